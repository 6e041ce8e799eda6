"""Relays client connections: each request goes to the server of its session, and bodies pass unchanged.

A client connection opens one connection to each server that it needs. The gateway reads request heads to check and
route them, and responses to find their ends. It adds the client's address to heads (`guard`), and the number of workers
to the answer to a v2 handshake. A WebSocket is routed once, by its handshake or, in protocol v2, by its first message.
Then its bytes are copied unread (`Pipe`).

    client ──> RelayedConnection ── HTTP ─> Upstream: the session's server ──> its response ──> client
                 ├── WebSocket, v1 ─────> Pipe ══ the session's server, or the least loaded one
                 └── WebSocket, v2 ─────> handshake with the least loaded server, then
                       ├ open(resume) ──> Pipe ══ the session's server, after the same handshake
                       └ open ──────────> Pipe ══ the server of the handshake
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import httptools

from openenv.protocol.codec import BY_NAME, Codec
from openenv.protocol.frames import FrameError, FrameReader, Opcode, WebSocketMessage
from openenv.protocol.json_values import encode

from ..access import FORBIDDEN, Role
from ..asgi import BODY_TOO_LARGE, HEAD_TOO_LARGE, MOST_FIELDS, MOST_HEAD_BYTES
from ..fast.http import HEAD_TIMEOUT_S
from ..request_head import (
    AUTHORIZATION,
    CLOSES,
    OFFERS_V2,
    UPGRADE,
    RequestHead,
    announced_sessions,
    is_request,
    read_head,
    value_of,
)
from ..runners import loop_local
from ..slow_clients import PartialRequests, UnreadReplies
from ..workers.protocols import WORKERS_HEADER
from ..workers.routing import MOST_BODY_BYTES, Destination, Router, read_open
from .backends import ANY, Backend, BackendUnavailable, UnknownBoot
from .guard import MOST_LOGIN_BYTES, GatewayRefusal

if TYPE_CHECKING:
    from .gateway import Gateway

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONNECT_S: Final = 5.0
_HANDSHAKE_S: Final = 30.0
_FIRST_MESSAGE_S: Final = 10.0  # a v2 connection that is silent for this long keeps its server
_LINGER_S: Final = 2.0
_FLUSH_S: Final = 30.0
_MOST_HELD: Final = MOST_HEAD_BYTES + MOST_BODY_BYTES  # beyond this, reading pauses until bytes are passed on
_MOST_NAMES: Final = 8  # unknown servers that the gateway looks up for one request
_MOST_WORKERS: Final = 999  # the highest number that clients accept

_CHOSEN: Final = re.compile(rb"\r\nsec-websocket-protocol:[ \t]*(openenv\.v2\.\w+)[ \t]*\r\n", re.IGNORECASE)
_WORKERS: Final = re.compile(rb"\r\n" + WORKERS_HEADER + rb":[^\r]*", re.IGNORECASE)
_CONNECTION: Final = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:[^\r]*\bchunked\b", re.IGNORECASE)
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
# The lines of a head as every parser reads them (RFC 9112, 5): another form could hide a field from the checks.
_PLAIN_FIELDS: Final = re.compile(rb"[^\r\n]*\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)*\r\n")
_HOST: Final = re.compile(rb"\r\nhost:", re.IGNORECASE)
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def response(status: int, body: bytes, content_type: str = "application/json", *, headers: str = "") -> bytes:
    """Return a whole HTTP response."""
    line = f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\n"
    fields = f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n{headers}"
    return f"{line}{fields}\r\n".encode() + body


def refusal(status: int, code: str, text: str, *, headers: str = "") -> bytes:
    """Return the gateway's refusal of a request; the connection ends after it."""
    if status == 503:
        headers += "retry-after: 1\r\n"
    return response(status, encode({"detail": text, "code": code}), headers=f"{headers}connection: close\r\n")


def _head_too_large() -> GatewayRefusal:
    text = f"A head has at most {MOST_HEAD_BYTES} bytes, in at most {MOST_FIELDS} fields."
    return GatewayRefusal(431, HEAD_TOO_LARGE, text)


class ResponseEnd:
    """Finds the end of a response (RFC 9112, 6.3).

    Args:
        to_head: Whether the request was HEAD; then the response has no body, even with a `Content-Length`.
    """

    def __init__(self, *, to_head: bool) -> None:
        self._to_head = to_head
        self._head = b""
        self._left: int | None = None
        self._parser: Any = None
        self.is_whole = False

    def feed(self, data: bytes) -> bool:
        """Add bytes; return whether the response is complete."""
        if self._parser is not None:
            self._parser.feed_data(data)
        elif self._left is not None:
            self._left -= len(data)
            self.is_whole = self._left <= 0
        else:
            self._read_head(self._head + data)
        return self.is_whole

    def _read_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._head = data
            return
        head = data[: end - 2]
        status = _STATUS.match(head)
        code = 0 if status is None else int(status[1])
        if 100 <= code < 200 and code != 101:  # an interim response: the real one follows
            self._head = b""
            if len(data) > end:
                self._read_head(data[end:])
        elif self._to_head or code in (204, 304):
            self.is_whole = True
        elif _CHUNKED.search(head):
            self._parser = httptools.HttpResponseParser(self)
            self._parser.feed_data(data)
        elif (length := _LENGTH.search(head)) is not None:
            self._left = int(length[1]) - (len(data) - end)
            self.is_whole = self._left <= 0
        else:  # it ends with the connection
            self._left = 1 << 62

    def on_message_complete(self) -> None:
        """Note the end; called by the parser of chunked bodies."""
        self.is_whole = True


class Pipe(asyncio.Protocol):
    """Copies the bytes of one connection to another, and reads only as fast as the other one sends.

    Args:
        transport: The source.
        to: The destination.
        on_end: Called when the source has ended.
    """

    __slots__ = ("_on_end", "_to", "_transport")

    def __init__(self, transport: asyncio.Transport, to: asyncio.Transport, on_end: Callable[[], None]) -> None:
        self._transport = transport
        self._to = to
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        """Copy the bytes."""
        self._to.write(data)

    def pause_writing(self) -> None:
        """Stop reading from the other side: this peer does not read."""
        _read(self._to, False)
        _unread().add(self._transport, lambda *_: self._transport.abort())

    def resume_writing(self) -> None:
        """Read from the other side again."""
        _unread().discard(self._transport)
        _read(self._to, True)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side too, after a grace period for its buffered bytes."""
        _unread().discard(self._transport)
        self._to.close()
        if self._to.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_FLUSH_S, self._to.abort)
        self._on_end()


def _unread() -> UnreadReplies:
    """Return the watch that ends connections to peers that do not read."""
    return loop_local(asyncio.get_running_loop(), UnreadReplies)


def _read(transport: asyncio.Transport, is_wanted: bool) -> None:
    if not transport.is_closing():
        (transport.resume_reading if is_wanted else transport.pause_reading)()


class HeldStream(asyncio.Protocol):
    """A connection that buffers received bytes until the owner takes them.

    Args:
        opened: Receives the transport, so that the owner can close it.
    """

    def __init__(self, opened: set[asyncio.Transport] | None = None) -> None:
        self._opened = opened
        self.held = b""
        self.is_lost = False
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the transport."""
        self.transport = cast(asyncio.Transport, transport)
        if self._opened is not None:
            self._opened.add(self.transport)

    def data_received(self, data: bytes) -> None:
        """Buffer the bytes."""
        self.held = self.held + data if self.held else data
        if len(self.held) > _MOST_HELD:
            _read(self.transport, False)
        self._awake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the waiter."""
        self.is_lost = True
        self._awake()

    def _awake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def more(self) -> None:
        """Wait for more bytes.

        Raises:
            ConnectionError: The connection has ended.
        """
        if self.is_lost or self.transport.is_closing():
            raise ConnectionError
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self.is_lost:
            raise ConnectionError

    async def take_head(self) -> bytes:
        """Take a response head, including its empty line.

        Raises:
            ConnectionError: The connection ended first, or the head is over the size limit.
        """
        while (end := self.held.find(b"\r\n\r\n")) < 0:
            if len(self.held) > MOST_HEAD_BYTES:
                raise ConnectionError
            await self.more()
        head, self.held = self.held[: end + 4], self.held[end + 4 :]
        return head


class Upstream(asyncio.Protocol):
    """One client's connection to a server for HTTP requests."""

    def __init__(self, relay: RelayedConnection, backend: Backend, opened: set[asyncio.Transport]) -> None:
        self.backend = backend
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._opened = opened
        self._relay = relay
        self._end: ResponseEnd | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the transport."""
        self.transport = cast(asyncio.Transport, transport)
        self._opened.add(self.transport)

    def begin(self, end: ResponseEnd) -> None:
        """Expect a response."""
        self._end = end

    def data_received(self, data: bytes) -> None:
        """Pass a response on to the client."""
        end = self._end
        if end is None:  # nothing was asked
            self.transport.abort()
            return
        self._relay.transport.write(data)
        try:
            if end.feed(data):
                self._end = None
                self._relay.response_done()
        except httptools.HttpParserError:
            self._relay.transport.close()

    def pause_writing(self) -> None:
        """Stop reading the request: the server takes no more of it now."""
        _read(self._relay.transport, False)

    def resume_writing(self) -> None:
        """Read the request again."""
        _read(self._relay.transport, True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the relay that the server has closed the connection."""
        self._opened.discard(self.transport)
        self._relay.upstream_lost(self)


class RelayedConnection(HeldStream):
    """A client's connection.

    Args:
        gateway: The state that all connections share.
    """

    can_be_heard = True

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._router = Router(gateway.backends, ANY)
        self._servers: set[asyncio.Transport] = set()  # connections to servers
        self._upstreams: dict[int, Upstream] = {}
        self._current: Upstream | None = None
        self._rest: int | None = 0  # missing bytes of the current request's body; None: everything that follows
        self._done: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_first = True
        self._is_late = False
        self._is_behind = False  # whether it does not read
        self._is_refused = False
        self.outgoing = b""  # the head of the current request, as servers get it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to serve."""
        super().connection_made(transport)
        self._gateway.relays.add(self)
        loop = asyncio.get_running_loop()
        self._partial = loop_local(loop, PartialRequests)
        self._task = loop.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        """Pass on the rest of the current request; buffer everything after it."""
        if self._is_refused:
            return
        if self._current is not None and self._rest != 0:
            if self._rest is None or len(data) <= self._rest:
                self._current.transport.write(data)
                if self._rest is not None:
                    self._rest -= len(data)
                    if not self._rest:
                        self._awake()
                return
            self._current.transport.write(data[: self._rest])
            data, self._rest = data[self._rest :], 0
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the connections to servers."""
        super().connection_lost(exc)
        self._end()
        if self._task is not None:
            self._task.cancel()

    def _end(self) -> None:
        self._gateway.relays.discard(self)
        self._partial.discard(self)
        _unread().discard(self.transport)
        self._end_head()
        self._upstreams, self._current = {}, None
        for server in list(self._servers):
            server.close()
        self._servers.clear()

    def pause_writing(self) -> None:
        """Pause the response and the next request: the client does not read."""
        self._is_behind = True
        _unread().add(self.transport, lambda reason, _: self.drop_request(reason))
        if self._current is not None:
            _read(self._current.transport, False)

    def resume_writing(self) -> None:
        """Continue the response."""
        self._is_behind = False
        _unread().discard(self.transport)
        if self._current is not None:
            _read(self._current.transport, True)
        self._awake()

    def drop_request(self, reason: str) -> None:
        """Drop the buffered part of a request, and end the connection."""
        self.held = b""
        self.transport.abort()

    def shut_down(self) -> None:
        """Close the connection, unless a request waits for its response: then `_serve` closes it later."""
        if self._done is None:
            self.transport.close()

    def upstream_lost(self, upstream: Upstream) -> None:
        """Forget a lost server connection; disconnect the client if the current or last request used it."""
        number = upstream.backend.number
        if self._upstreams.get(number) is upstream:
            del self._upstreams[number]
        if self._current is upstream:
            self.transport.close()

    def response_done(self) -> None:
        """Continue with the next request."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # -- requests -------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while not self.transport.is_closing():
                while self._is_behind:
                    await self.more()
                head = await self._next_head()
                self._admit(head)
                if UPGRADE.search(head.raw):
                    await self._relay_socket(head)
                    return
                await self._relay_request(head)
                self._is_first = False
                if self._gateway.is_closing:
                    self.transport.close()
        except BackendUnavailable as exc:
            self._refuse(503, exc.code, str(exc))
        except GatewayRefusal as exc:
            self._refuse(exc.status, exc.code, str(exc), headers=exc.headers)
        except (ConnectionError, asyncio.CancelledError):
            self.transport.close()
        except Exception:  # the boundary of one connection
            logger.exception("a connection could not be relayed")
            self.transport.abort()

    def _admit(self, head: RequestHead) -> None:
        """Check a request, and prepare its head for a server."""
        role = self._gateway.guard.admit(head, self.here)
        if role is not Role.ORCHESTRATOR and self._gateway.backends.unguarded():
            text = f"Some servers behind this gateway do not check roles, so it refuses the role {role.value!r}."
            raise GatewayRefusal(403, FORBIDDEN, text)
        peer = self.transport.get_extra_info("peername")
        self.outgoing = self._gateway.guard.forwarded(head, str(peer[0]) if isinstance(peer, tuple) else "unknown")

    @property
    def here(self) -> Any:
        """The address that the client has connected to."""
        return self.transport.get_extra_info("sockname")

    def _refuse(self, status: int, code: str, text: str, *, headers: str = "") -> None:
        """Refuse the request. Drop further bytes for a while: closing at once could reset the connection unread."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        self._end_head()
        self.transport.write(refusal(status, code, text, headers=headers))
        self.transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self.transport.abort)

    async def _next_head(self) -> RequestHead:
        self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self.transport.close)
        while (end := self.held.find(b"\r\n\r\n")) < 0:
            if len(self.held) > MOST_HEAD_BYTES:
                raise _head_too_large()
            if self.held and not is_request(self.held):
                raise GatewayRefusal(400, "BAD_REQUEST", "This is not an HTTP request.")
            await self._hold()
        raw = self.held[: end + 4]
        if len(raw) > MOST_HEAD_BYTES or raw.count(b"\r\n") > MOST_FIELDS + 2:
            raise _head_too_large()
        head = read_head(raw)
        if head is None or not _PLAIN_FIELDS.fullmatch(raw) or len(_HOST.findall(raw)) > 1:
            raise GatewayRefusal(400, "BAD_REQUEST", "The head of the request cannot be read.")
        return head

    async def _hold(self) -> None:
        self._partial.hold(self, len(self.held))
        try:
            await self.more()
        finally:
            self._partial.discard(self)

    async def _body(self, head: RequestHead) -> bytes:
        """Return the part of the body that routing needs; it stays buffered."""
        if head.body_bytes is None or not await self._routed(lambda: self._router.needs_body(head)):
            return b""
        start = len(head.raw)
        wanted = start + min(head.body_bytes, MOST_BODY_BYTES)
        while len(self.held) < wanted:
            await self._hold()
        return self.held[start:wanted]

    async def _routed(self, choose: Callable[[], T]) -> T:
        """Choose a server. If a name belongs to an unknown server, look for that server and choose again."""
        for _ in range(_MOST_NAMES):
            try:
                return choose()
            except UnknownBoot as exc:
                await self._gateway.backends.look_for(str(exc))
        raise BackendUnavailable("BACKEND_UNREACHABLE", "The request names sessions of too many unknown servers.")

    async def _relay_request(self, head: RequestHead) -> None:
        answer = self._gateway.answer(head, self)
        if answer is None and self._gateway.guard.answers_login(head):
            answer = self._login(head, await self._login_body(head))
        elif answer is not None:
            self.held = self.held[len(head.raw) :]
        if answer is not None:
            self._end_head()
            self.transport.write(await answer)
            if CLOSES.search(head.raw):
                self.transport.close()
            return
        body = await self._body(head)
        to = await self._routed(lambda: self._router.of_request(head, body, is_first=self._is_first))
        self._end_head()
        self._current = self._upstreams.get(to.place) or await self._upstream(to)
        self._send(self._current, head)
        assert self._done is not None
        try:
            await self._done
        finally:
            self._done = None
        while self._rest != 0:  # the response came before the whole request
            await self.more()
        self._read_on()

    async def _login_body(self, head: RequestHead) -> bytes:
        if head.body_bytes is None or head.body_bytes > MOST_LOGIN_BYTES:
            raise GatewayRefusal(413, BODY_TOO_LARGE, f"A login has at most {MOST_LOGIN_BYTES} bytes.")
        start, end = len(head.raw), len(head.raw) + head.body_bytes
        while len(self.held) < end:
            await self._hold()
        body, self.held = self.held[start:end], self.held[end:]
        return body

    async def _login(self, head: RequestHead, body: bytes) -> bytes:
        status, text, headers = await self._gateway.guard.login(head, body, self.here)
        return response(status, text, headers=headers)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _upstream(self, to: Destination) -> Upstream:
        backend, upstream = await self._connect(to, lambda one: Upstream(self, one, self._servers))
        self._upstreams[backend.number] = upstream
        return upstream

    def _send(self, upstream: Upstream, head: RequestHead) -> None:
        self._router.move(upstream.backend.number)
        self._done = asyncio.get_running_loop().create_future()
        upstream.begin(ResponseEnd(to_head=head.method == b"HEAD"))
        if head.body_bytes is None:
            # Only a parser can find the end of this request, so it is the last one on its connection.
            begin = _CONNECTION.sub(b"", self.outgoing[:-2]) + b"connection: close\r\n\r\n"
            data = begin + self.held[len(head.raw) :]
            self.held, self._rest = b"", None
        else:
            size = len(head.raw) + head.body_bytes
            body, self.held = self.held[len(head.raw) : size], self.held[size:]
            self._rest = head.body_bytes - len(body)
            data = self.outgoing + body
        upstream.transport.write(data)
        self._read_on()

    def _read_on(self) -> None:
        if len(self.held) <= _MOST_HELD:
            _read(self.transport, True)

    async def _connect(self, to: Destination, make: Callable[[Backend], T]) -> tuple[Backend, T]:
        """Open a connection to a server. A request for a new session may fall back to another server.

        Raises:
            BackendUnavailable: No suitable server can be reached.
        """
        loop, backends = asyncio.get_running_loop(), self._gateway.backends
        backend = backends.get(to.place)
        can_move = backend is None or to.sessions > 0
        backend = backend or backends.least_loaded()
        while True:
            make_protocol: Any = partial(make, backend)
            connecting = loop.create_connection(make_protocol, backend.host, backend.port, ssl=backend.tls)
            try:
                _, protocol = await asyncio.wait_for(connecting, _CONNECT_S)
                return backend, cast(T, protocol)
            except (OSError, asyncio.TimeoutError) as exc:
                logger.debug("%s cannot be reached: %s", backend.url, exc)
                backend.admits = False  # until it is asked again
                backends.count(backend, -to.sessions)
                if not can_move:
                    text = "The server of the session cannot be reached now."
                    raise BackendUnavailable("BACKEND_UNREACHABLE", text) from exc
            backend = backends.least_loaded()
            backends.count(backend, to.sessions)

    # -- WebSockets -----------------------------------------------------------------------------------------------

    async def _relay_socket(self, head: RequestHead) -> None:
        to = await self._routed(lambda: self._router.of_upgrade(head))
        self._end_head()
        self.held = self.held[len(head.raw) :]
        is_v2 = head.path == "/ws" and OFFERS_V2.search(head.raw) is not None
        if is_v2 and to.place == ANY:  # the first message will most likely open the announced sessions
            to = self._gateway.backends.place(ANY, None, announced_sessions(head.raw))
        backend, server = await self._connect(to, lambda _: HeldStream(self._servers))
        server.transport.write(self.outgoing)
        codec = None
        if is_v2:
            answer = await self._handshake(server)
            self.transport.write(self._with_workers(answer))
            codec = _chosen_codec(answer)
        if codec is not None:
            moved = await self._first_message(head, codec, backend)
            if moved is not None and moved != backend.number:
                self._gateway.backends.count(backend, -to.sessions)
                server.transport.abort()
                backend, server = await self._move(moved)
        self._join(backend, server, is_resumable=codec is not None)

    async def _handshake(self, server: HeldStream) -> bytes:
        """Return a server's answer to a handshake."""
        timer = asyncio.get_running_loop().call_later(_HANDSHAKE_S, server.transport.abort)
        try:
            return await server.take_head()
        finally:
            timer.cancel()

    def _with_workers(self, answer: bytes) -> bytes:
        """Add the number of processes that the client could spread its sessions over."""
        workers = min(_MOST_WORKERS, sum(one.workers for one in self._gateway.backends.admitting()))
        if workers < 2 or not answer.startswith(b"HTTP/1.1 101"):
            return answer
        return _WORKERS.sub(b"", answer[:-2]) + WORKERS_HEADER + b": %d\r\n\r\n" % workers

    async def _first_message(self, head: RequestHead, codec: Codec, backend: Backend) -> int | None:
        """Return the server that the first v2 message asks for; None to keep the current one."""
        message = await self._message()
        if message is None:
            return None
        is_binary = message.opcode == Opcode.BINARY
        request = read_open(message.payload, codec, binary=is_binary, limit=MOST_BODY_BYTES)
        if request is None:
            return None
        backends = self._gateway.backends
        if request.session is not None:
            session = request.session
            try:
                number: int | None = await self._routed(lambda: backends.find(session))
            except BackendUnavailable:
                raise ConnectionError from None  # the handshake is answered already; the client reconnects
            return number if number is not None and number >= 0 else None
        key = request.key(value_of(AUTHORIZATION, head.raw) or "")
        if key is None:
            return None
        known = backends.known(key)
        if known is None:
            backends.remember(key, backend)
        return known

    async def _message(self) -> WebSocketMessage | None:
        """Return the first message, which stays buffered; None if it cannot be an `open`."""
        self._timer = asyncio.get_running_loop().call_later(_FIRST_MESSAGE_S, self._be_late)
        reader, seen = FrameReader(MOST_BODY_BYTES), 0
        try:
            while seen <= MOST_BODY_BYTES and not self._is_late:
                if len(self.held) == seen:
                    await self._hold()
                    continue
                messages, seen = reader.feed(self.held[seen:]), len(self.held)
                for message in messages:
                    if message.opcode not in (Opcode.PING, Opcode.PONG):
                        return message if message.opcode in (Opcode.TEXT, Opcode.BINARY) else None
        except FrameError:  # the server reports the error
            return None
        finally:
            self._end_head()
        return None

    def _be_late(self) -> None:
        self._is_late = True
        self._awake()

    async def _move(self, number: int) -> tuple[Backend, HeldStream]:
        """Repeat the handshake with another server; the client has its answer already."""
        try:
            backend, server = await self._connect(Destination(number), lambda _: HeldStream(self._servers))
            server.transport.write(self.outgoing)
            answer = await self._handshake(server)
        except BackendUnavailable:
            raise ConnectionError from None  # the client reconnects
        if not answer.startswith(b"HTTP/1.1 101"):
            server.transport.abort()
            raise ConnectionError
        return backend, server

    def _join(self, backend: Backend, server: HeldStream, *, is_resumable: bool) -> None:
        """Copy bytes in both directions from now on."""
        if self.is_lost or server.is_lost or self.transport.is_closing():
            raise ConnectionError
        early, self.held = self.held, b""
        late, server.held = server.held, b""
        self._servers.discard(server.transport)
        self._end()
        joined = JoinedSocket(self._gateway, backend, self.transport, is_resumable=is_resumable)
        self.transport.set_protocol(Pipe(self.transport, server.transport, joined.end))
        server.transport.set_protocol(Pipe(server.transport, self.transport, joined.end))
        if early:
            server.transport.write(early)
        if late:
            self.transport.write(late)
        for transport in (self.transport, server.transport):
            _read(transport, True)


class JoinedSocket:
    """A WebSocket between a client and a server, copied byte by byte.

    Args:
        gateway: The state that all connections share.
        backend: The server.
        transport: The client's connection.
        is_resumable: Whether the client can resume on another connection, because it speaks protocol v2.
    """

    def __init__(self, gateway: Gateway, backend: Backend, transport: asyncio.Transport, *, is_resumable: bool) -> None:
        self.transport = transport
        self.is_resumable = is_resumable
        self._gateway = gateway
        self._backend = backend
        gateway.sockets.add(self)
        backend.sockets += 1

    def end(self) -> None:
        """Forget the socket: one side has ended."""
        if self in self._gateway.sockets:
            self._gateway.sockets.discard(self)
            self._backend.sockets -= 1


def _chosen_codec(answer: bytes) -> Codec | None:
    """Return the codec of an accepted v2 handshake."""
    chosen = _CHOSEN.search(answer) if answer.startswith(b"HTTP/1.1 101") else None
    return None if chosen is None else BY_NAME.get(chosen[1].decode().lower())
