"""The agents' side of the proxy: HTTP/1.1 requests in, replies out, on TCP or a unix socket.

Knows connections, limits and framing. Must not know dialects, keys or endpoints.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import httptools

log = logging.getLogger("openenv.rollout.capture")

HEADER_LIMIT = 64 * 1024
IDLE_S = 75.0
RECEIVE_S = 60.0
_QUEUE_LIMIT = 8
_HELD_STEP = 20  # bits: what a key holds is added up once per so many bytes


@dataclass(slots=True)
class AgentRequest:
    """One request of an agent, whole."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def key(self) -> str:
        """Return the key that was sent, as OpenAI's or as Anthropic's clients send it."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        return self.headers.get("x-api-key", "") or self.headers.get("api-key", "")


@dataclass(frozen=True, slots=True)
class InboundLimits:
    """What a connection may ask for."""

    body: int = 64 * 1024 * 1024
    connections: int = 2048
    stranger: int = 256 * 1024
    """The body of a request whose key is not known."""
    held: int = 256 * 1024 * 1024
    """All bodies of one key together that are not answered yet: they are in the memory of whoever runs the proxy."""


class AgentReply:
    """The answer to one request, written as it comes. Its owner may learn that the agent has gone."""

    def __init__(self, connection: AgentConnection, *, keep_alive: bool, has_body: bool = True) -> None:
        self._connection = connection
        self._has_body = has_body
        self._keep_alive = keep_alive
        self._chunked = False
        self.started = False
        self.ended = False
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[bool], None] | None = None

    @property
    def gone(self) -> bool:
        """Say whether the agent has hung up."""
        return self._connection.closed

    def send(self, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Answer in one piece."""
        self._head(status, [*headers, ("content-length", str(len(body)))], body if self._has_body else b"")
        self.end()

    def start(self, status: int, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Begin an answer whose length is not known yet."""
        self._chunked = True
        self._head(status, [*headers, ("transfer-encoding", "chunked")], b"")

    def _head(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.started = True
        try:
            phrase = http.HTTPStatus(status).phrase
        except ValueError:
            phrase = "Status"
        if not self._keep_alive:
            headers.append(("connection", "close"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self._connection.write(f"HTTP/1.1 {status} {phrase}\r\n{lines}\r\n".encode("latin-1", "replace") + body)

    def write(self, data: bytes) -> None:
        """Send a piece of an answer that was started."""
        if data:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, *, abort: bool = False) -> None:
        """Finish; with `abort`, so that the agent sees that the answer is not whole."""
        if self.ended:
            return
        self.ended = True
        if abort:
            self._connection.close()
            return
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        if not self._keep_alive:
            self._connection.close()

    def paused(self, is_paused: bool) -> None:
        """Take note that the agent reads slowly, or has caught up."""
        if self.on_pause is not None:
            self.on_pause(is_paused)

    def lost(self) -> None:
        """Take note that the agent has hung up."""
        if self.on_gone is not None:
            self.on_gone()


Handler: TypeAlias = "Callable[[AgentRequest, AgentReply], Awaitable[None]]"


class AgentConnection(asyncio.Protocol):
    """One connection of an agent: requests are answered one after the other."""

    def __init__(
        self,
        handler: Handler,
        limits: InboundLimits,
        peers: dict[AgentConnection, None],
        *,
        is_known: Callable[[str], bool] = lambda key: True,
    ) -> None:
        self._handler = handler
        self._is_known = is_known
        self._limits = limits
        self._peers = peers
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._queue: deque[tuple[AgentRequest, bool]] = deque()
        self._reply: AgentReply | None = None
        self._answering: AgentRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._request = AgentRequest("", "")
        self._body: list[bytes] = []
        self._size = self._header_size = 0
        self._limit = limits.body
        self._expects = False
        self.closed = False

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._peers) >= self._limits.connections:
            idle = next((peer for peer in self._peers if peer.is_idle), None)
            if idle is None:
                self._refuse(503, "too many connections")
                return
            idle.abort()  # nobody keeps others out by holding connections
            self._peers.pop(idle, None)
        self._peers[self] = None
        self._arm(RECEIVE_S)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(426, "no protocol but HTTP/1.1 is spoken here")
        except _TooLarge as exc:
            self._refuse(exc.status, exc.text)
        except httptools.HttpParserError as exc:
            cause = exc.__context__
            if isinstance(cause, _TooLarge):
                self._refuse(cause.status, cause.text)
            else:
                self._refuse(400, "this is not HTTP")

    def eof_received(self) -> bool | None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._peers.pop(self, None)
        self._disarm()
        self._queue.clear()
        if self._reply is not None and not self._reply.ended:
            self._reply.lost()

    def pause_writing(self) -> None:
        if self._reply is not None:
            self._reply.paused(True)

    def resume_writing(self) -> None:
        if self._reply is not None:
            self._reply.paused(False)

    # the parser calls these

    def on_message_begin(self) -> None:
        self._request = AgentRequest("", "")
        self._body = []
        self._size = self._header_size = 0
        self._expects = False

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        self._request.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        lowered = name.decode("latin-1").lower()
        self._request.headers[lowered] = value.decode("latin-1")
        if lowered == "expect" and value.lower() == b"100-continue":
            self._expects = True

    def on_headers_complete(self) -> None:
        self._request.method = self._parser.get_method().decode("latin-1")
        length = self._request.headers.get("content-length", "")
        known = self._is_known(self._request.key)
        self._limit = self._limits.body if known else min(self._limits.stranger, self._limits.body)
        if length.isdigit() and int(length) > self._limits.body:
            raise _TooLarge(413, f"a request may have {self._limits.body} bytes")
        if length.isdigit() and int(length) > self._limit:
            raise _TooLarge(401, "this key is not known here")
        if self._reply is None:
            self._welcome()

    def on_body(self, body: bytes) -> None:
        before, self._size = self._size, self._size + len(body)
        if self._size > self._limit:
            raise _TooLarge(413, f"a request may have {self._limit} bytes")
        self._body.append(body)
        if before >> _HELD_STEP != self._size >> _HELD_STEP:
            key = self._request.key
            if sum(peer.holds(key) for peer in self._peers) > self._limits.held:
                raise _TooLarge(429, f"all requests together may have {self._limits.held} bytes")

    def on_message_complete(self) -> None:
        self._request.body = b"".join(self._body)
        self._body = []
        self._expects = False
        if len(self._queue) >= _QUEUE_LIMIT:
            raise _TooLarge(429, "too many requests at once on one connection")
        self._queue.append((self._request, self._parser.should_keep_alive()))
        if self._reply is None:
            self._next()

    def _count_header(self, size: int) -> None:
        self._header_size += size
        if self._header_size > HEADER_LIMIT:
            raise _TooLarge(431, f"the headers may have {HEADER_LIMIT} bytes")

    def holds(self, key: str) -> int:
        """Return how many bytes of requests with this key are here, whole or not."""
        waiting = sum(len(request.body) for request, _ in self._queue if request.key == key)
        answering = self._answering
        under_way = len(answering.body) if answering is not None and answering.key == key else 0
        coming = self._size if self._body and self._request.key == key else 0
        return waiting + under_way + coming

    @property
    def is_idle(self) -> bool:
        """Say whether no request of this connection is being answered."""
        return self._reply is None

    # answering

    def _next(self) -> None:
        request, keep_alive = self._queue.popleft()
        self._answering = request
        self._disarm()
        self._reply = AgentReply(self, keep_alive=keep_alive, has_body=request.method != "HEAD")
        self._task = self._loop.create_task(self._answer(request, self._reply))

    async def _answer(self, request: AgentRequest, reply: AgentReply) -> None:
        try:
            await self._handler(request, reply)
        except Exception:  # the boundary of a request
            log.exception("a request failed: %s %s", request.method, request.path.partition("?")[0])
            if not reply.started:
                reply.send(500, b'{"error":{"message":"the capture proxy failed","type":"api_error"}}')
        finally:
            if not reply.ended:
                reply.end(abort=True)
            self._reply = self._answering = None
            self._task = None
        if self._queue and not self.closed:
            self._next()
        else:
            self._welcome()
            self._arm(IDLE_S)

    def _welcome(self) -> None:
        """Tell an agent that waits for it to send its body."""
        if self._expects:
            self._expects = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def write(self, data: bytes) -> None:
        """Send bytes; nothing happens once the agent has gone."""
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    def close(self) -> None:
        """Close once all is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, status: int, text: str) -> None:
        if self._reply is None and self._transport is not None:
            body = b'{"error":{"message":"%b","type":"invalid_request_error"}}' % text.encode()
            self._parser = httptools.HttpRequestParser(self)
            AgentReply(self, keep_alive=False).send(status, body, [("content-type", "application/json")])
        self.close()

    def _arm(self, delay: float) -> None:
        self._disarm()
        if not self.closed:
            self._timer = self._loop.call_later(delay, self.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _TooLarge(Exception):
    """A request is larger than it may be."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
