"""The agents' side of the proxy: uvicorn's HTTP/1.1 connection with this proxy's limits, and the replies written to it.

Knows HTTP, keys and limits. Knows nothing of dialects, rollouts or endpoints.
"""

# What limits an agent, from the outside to the inside:
#
#   connections     `ConnectionQuota`: shared by unknown keys, some for each known key; idle ones make room
#   head            HEADER_LIMIT bytes
#   time            RECEIVE_S for a whole request, IDLE_S between two
#   body            InboundLimits.body, for unknown keys unknown_key_body; so many JSON values
#   memory          InboundLimits.held for all unanswered requests of a key
#   the event loop  `AgentConnections.turn`: requests of one key are handled one after the other, with pauses

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from openenv.sandboxes.host import ConnectionQuota

from .encoding import Json, dumps

log = logging.getLogger("openenv.rollout.capture")

HEADER_LIMIT = 64 * 1024
IDLE_S = 75.0
RECEIVE_S = 60.0
_VALUE_BYTES = 200
"""The largest memory of a parsed value: an object with one key."""
_UNCOUNTED = 64 * 1024
"""The size of a body below which its JSON values are not counted; most bodies are smaller."""
JSON_TYPE = ("content-type", "application/json")
Headers: TypeAlias = Iterable[tuple[str, str]]


@dataclass(slots=True)
class AgentRequest:
    """One complete request of an agent."""

    method: str
    path: str
    """The target as it was sent, with its query."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    parsed: Json | None = None
    """The body of a request from this process, which has no bytes then."""
    held: int = 0
    """The bytes that count against the key's limit (`InboundLimits.held`)."""

    @property
    def route_path(self) -> str:
        """Return the target without its query."""
        return self.path.partition("?")[0]

    @property
    def key(self) -> str:
        """Return the API key, from the place that OpenAI's, Anthropic's or Google's clients use."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        named = (self.headers.get(name, "") for name in ("x-api-key", "api-key", "x-goog-api-key"))
        return next(filter(None, named), "") or self._key_in_query

    @property
    def _key_in_query(self) -> str:
        values = parse_qs(self.path.partition("?")[2]).get("key") if "key=" in self.path else None
        return values[0] if values else ""


class RequestRefused(Exception):
    """A request gets an error status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class InboundLimits:
    """The limits of connections."""

    body: int = 64 * 1024 * 1024
    unknown_key_body: int = 256 * 1024
    """The largest body of a request with an unknown key."""
    values: int = 1_000_000
    """The approximate number of JSON values in a body: while they are parsed, every other agent waits."""
    held: int = 256 * 1024 * 1024
    """The memory of all unanswered requests of one key."""

    def check(self, body: bytes) -> None:
        """Check a whole request of a known key.

        Raises:
            RequestRefused: It is too large.
        """
        if len(body) > self.body:
            raise RequestRefused(413, f"a request may have {self.body} bytes")
        if len(body) > _UNCOUNTED and count_values(body) > self.values:
            raise RequestRefused(413, f"a request may have {self.values} JSON values")


def count_values(piece: bytes) -> int:
    """Return an upper bound of the JSON values in a piece of a body: texts contain commas, too."""
    return sum(map(piece.count, b",[{"))


class AgentReply:
    """The answer to one request, in pieces. Writing waits while the agent reads slowly."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.started = False
        self.ended = False
        self.gone = False
        """Whether the agent has hung up; later writes are dropped."""
        self.on_gone: Callable[[], None] | None = None

    async def send(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """Answer in one piece."""
        await self.start(status, [*headers, ("content-length", str(len(body)))])
        self.ended = True
        await self._cycle.send({"type": "http.response.body", "body": body})

    async def send_json(self, value: Json, status: int = 200, headers: Headers = ()) -> None:
        """Answer with a JSON object."""
        await self.send(status, dumps(value), [JSON_TYPE, *headers])

    async def start(self, status: int, headers: Headers = ()) -> None:
        """Begin an answer; without a length it is chunked."""
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        await self._cycle.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Send the next piece of a started answer."""
        if data and not self.ended:
            await self._cycle.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Finish a started answer."""
        self.ended = True
        await self._cycle.send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self, data: bytes = b"") -> None:
        """Cut a chunked answer after a last piece: without a final chunk, the agent knows that it is incomplete."""
        # Without waiting: a revoked call must end even if its agent does not read.
        self.ended = True
        transport = self._cycle.transport
        if data and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        transport.close()
        self._cycle.disconnected = True  # for uvicorn, which reports an application that leaves an answer unfinished


@dataclass(slots=True)
class LocalReply(AgentReply):
    """The answer to a request from this process: there is no connection, so it is kept as a whole."""

    status: int = 0
    body: bytes = b""
    started: bool = False
    ended: bool = False
    gone: bool = False
    on_gone: Callable[[], None] | None = None

    async def send(self, status: int, body: bytes, headers: Headers = ()) -> None:
        await self.start(status)
        await self.write(body)
        await self.end()

    async def start(self, status: int, headers: Headers = ()) -> None:
        self.started, self.status = True, status

    async def write(self, data: bytes) -> None:
        if not self.ended:
            self.body += data

    async def end(self) -> None:
        self.ended = True

    def abort(self, data: bytes = b"") -> None:
        """End an answer that is incomplete."""
        self.ended, self.status = True, 502
        self.body += data

    def hang_up(self) -> None:
        """End the call: its caller no longer waits."""
        if not self.ended:
            self.gone = True
            if self.on_gone is not None:
                self.on_gone()


Handler: TypeAlias = Callable[[AgentRequest, AgentReply], Awaitable[None]]


class AgentConnections:
    """All connections of agents, and their shared limits.

        connected --- a request with a known key ---> a place of that key's, in `quota`
            |                                             |
            as many as the quota's pool; beyond that      none left: the key's oldest idle connection makes room,
            an idle one makes room, of the sandbox or     or the request is refused with 429
            address that has the most

    Neither idle connections nor other rollouts can lock an agent out.
    """

    def __init__(
        self, limits: InboundLimits, *, is_known: Callable[[str], bool], quota: ConnectionQuota | None = None
    ) -> None:
        self.limits = limits
        self.is_known = is_known
        self.quota = quota or ConnectionQuota()
        self._held: Counter[str] = Counter()  # bytes of unanswered requests by key
        self._open: dict[AgentConnection, None] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._unknown: dict[AgentConnection, None] = {}  # connections that have sent no known key yet
        # `access_log=False` would silence the access log of every uvicorn in this process: connections do it instead.
        self.config = Config(
            app=_no_app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(IDLE_S),
        )
        self.state = ServerState()

    def accept(self, handler: Handler) -> AgentConnection:
        """Return the protocol of a new connection."""
        return AgentConnection(self, handler)

    # Unknown keys: agents that have not sent their first request, and attackers. They share one pool of connections.
    # If it is full, the origin with the most connections loses an idle one: a flood from one sandbox hurts itself.
    def admit(self, connection: AgentConnection) -> bool:
        """Add a connection; return False if too many have no known key and none of them is idle."""
        if len(self._unknown) >= max(16, self.quota.shared):
            (largest, _), *_ = Counter(other.origin for other in self._unknown).most_common(1)
            if not self._close_idle(other for other in self._unknown if other.origin == largest):
                return False
        self._open[connection] = self._unknown[connection] = None
        return True

    def identify(self, connection: AgentConnection, key: str) -> None:
        """Assign a connection to a known key.

        Raises:
            RequestRefused: The key has its maximum of connections, and none of them is idle.
        """
        if connection.key == key or connection not in self._open:  # a connection that is not open made room for another
            return
        if not self.quota.take(key):
            same_key = [other for other in self._open if other.key == key]
            if not (self._close_idle(same_key) and self.quota.take(key)):
                raise RequestRefused(
                    429, f"this key has {len(same_key)} connections, and each is waiting for an answer"
                )
        self._release(connection)
        connection.key = key

    def _close_idle(self, connections: Iterable[AgentConnection]) -> bool:
        idle = next((connection for connection in connections if connection.is_idle), None)
        if idle is None:
            return False
        self.discard(idle)
        idle.transport.abort()
        return True

    def discard(self, connection: AgentConnection) -> None:
        """Remove a connection."""
        if connection not in self._open:
            return
        del self._open[connection]
        self._release(connection)

    def _release(self, connection: AgentConnection) -> None:
        self._unknown.pop(connection, None)
        if connection.key is not None:
            self.quota.release(connection.key)
            if not self.quota.held(connection.key):
                self._turns.pop(connection.key, None)

    async def turn(self, key: str) -> None:
        """Wait until a request of a known key may be handled: one at a time, each after a pause.

        All agents share one event loop, and to parse and record a large request holds it up. The pause is as long as
        that took, so that a key with many such requests leaves half of the time to others.

            one key     parse ──── pause ──── parse ──── pause ────        other keys run in the pauses
        """
        lock = self._turns.setdefault(key, asyncio.Lock())
        await lock.acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()

        def pause() -> None:
            loop.call_later(loop.time() - began, lock.release)

        loop.call_soon(pause)  # runs when the handler waits for the first time, and other work has its turn

    def hold(self, request: AgentRequest, size: int) -> None:
        """Add bytes to the memory of a request's key, or take them off.

        Raises:
            RequestRefused: The requests of the key hold too much memory.
        """
        key = request.key
        request.held += size
        self._held[key] += size
        if self._held[key] > self.limits.held and size > 0:
            raise RequestRefused(429, f"all requests together may take {self.limits.held} bytes of memory")
        if self._held[key] == 0:
            del self._held[key]

    def close(self, *, abort: bool = False) -> None:
        """Close every connection: at once with `abort`, else after the buffered data."""
        for connection in list(self._open):
            connection.transport.abort() if abort else connection.transport.close()


class AgentConnection(HttpToolsProtocol):
    """One connection: uvicorn parses, queues pipelined requests and frames replies; this class adds the limits.

        connected --- whole request ---> answering --- reply complete ---> idle --- whole request ---> answering
            |                                                               |
            +--- RECEIVE_S: closed                                          +--- IDLE_S: closed

    uvicorn limits neither headers nor bodies nor the time of a request, and with too many connections it answers 503
    instead of closing an idle one.
    """

    def __init__(self, shared: AgentConnections, handler: Handler) -> None:
        super().__init__(shared.config, shared.state, app_state={})
        self.app = self._answer
        self.access_log = False
        self.origin = ""
        """The origin: the name of a sandbox's relay, or an address."""
        self.key: str | None = None
        """The known key of the latest request."""
        self._shared = shared
        self._handler = handler
        self._cycles: deque[RequestResponseCycle] = deque()
        self._reply: AgentReply | None = None
        self._head_size = 0
        self._refusal = (400, "this is not HTTP")
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being answered; a request that still arrives does not count."""
        return self._reply is None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.origin = _origin(transport)
        if self._shared.admit(self):
            self._set_deadline(RECEIVE_S)
        else:
            self._refusal = (503, "too many connections")
            self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._shared.discard(self)
        self._set_deadline(None)
        reply = self._reply
        if reply is not None and not reply.ended:
            reply.gone = True
            if reply.on_gone is not None:
                reply.on_gone()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > HEADER_LIMIT:
            self._refusal = (431, f"the headers may have {HEADER_LIMIT} bytes")
            raise ValueError(self._refusal[1])  # the parser stops, and `send_400_response` follows

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._cycles.append(self.cycle)  # `self.cycle` is the latest request; `_answer` needs its own

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline(IDLE_S)

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, and hang up."""
        if self._reply is None:
            status, text = self._refusal
            body = dumps(_error(text))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _set_deadline(self, delay_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if delay_s is not None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(delay_s, self.transport.close)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: read one request within the limits, and pass it to the handler."""
        reply = AgentReply(self._cycles.popleft())
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = AgentRequest(scope["method"], target.decode("latin-1"), headers)
        try:
            if not await self._receive_body(request, receive):
                return
            self._set_deadline(None)
            self._reply = reply
            if self.key == request.key:  # a known one
                await self._shared.turn(request.key)
            if not reply.gone:
                await self._handler(request, reply)
        except RequestRefused as exc:
            await reply.send_json(_error(str(exc)), exc.status, [("connection", "close")])
        except Exception:  # the boundary of a request
            log.exception("a request failed: %s %s", request.method, request.path.partition("?")[0])
            if not reply.started:
                await reply.send_json(_error("the capture proxy failed", "api_error"), 500)
        finally:
            self._shared.hold(request, -request.held)
            if self._reply is reply:  # the next pipelined request may be under way by now
                self._reply = None
            if not reply.ended:
                reply.abort()

    # Limits apply while the body arrives, not afterwards: a request must not fill the memory before it is refused.
    async def _receive_body(self, request: AgentRequest, receive: Receive) -> bool:
        """Read the body; return False if the agent hangs up before its end.

        Raises:
            RequestRefused: The body is too large for a request of this key.
        """
        key, shared, limits = request.key, self._shared, self._shared.limits
        is_known = shared.is_known(key)
        if is_known:
            shared.identify(self, key)
        limit = limits.body if is_known else min(limits.unknown_key_body, limits.body)
        length = request.headers.get("content-length", "")
        # An honest client learns from the head that its request is too large, before it has sent gigabytes.
        if length.isdigit() and int(length) > limits.body:
            raise RequestRefused(413, f"a request may have {limits.body} bytes")
        if length.isdigit() and int(length) > limit:
            raise RequestRefused(401, "this key is not known here")
        body, values, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece, more = message["body"], message["more_body"]
            body += piece
            shared.hold(request, len(piece))
            if len(body) > limit:
                raise RequestRefused(413, f"a request may have {limit} bytes")
            if len(body) > _UNCOUNTED:
                marks = count_values(piece)
                values += marks
                shared.hold(request, marks * _VALUE_BYTES)
                if values > limits.values:
                    raise RequestRefused(413, f"a request may have {limits.values} JSON values")
        request.body = bytes(body)
        return True


def _origin(transport: asyncio.Transport) -> str:
    end = transport.get_extra_info("socket")
    try:
        name = end.getpeername()
    except OSError:  # the agent has hung up
        return ""
    if isinstance(name, bytes):  # of a relay in `openenv.sandboxes.exposed_ports`; the last part is random
        return name.rpartition(b"/")[0].decode("latin-1")
    return str(name[0]) if isinstance(name, tuple) else name


def _error(text: str, kind: str = "invalid_request_error") -> Json:
    return {"error": {"message": text, "type": kind}}


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Fill the application of uvicorn's configuration; each connection has its own."""
