"""The endpoints' side of the proxy: HTTP/1.1 requests out, responses in as they come, over TCP or TLS.

Knows HTTP, and nothing of dialects or rollouts. No HTTP library, because of `benchmarks/capture.py`: with 200 streams,
httpcore2 (the core of httpx2) added 10 and 20 ms to a chunk; this module added 0.7 and 0.4 ms in the same runs. The
pool of httpcore2 polls every kept connection at each request (8 ms of CPU per call instead of 1 ms), and h11 doubles
the CPU of a chunk (0.3 to 0.45 ms instead of 0.15 to 0.2 ms).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import re
import ssl
import time
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from typing import Literal, TypeAlias, cast
from urllib.parse import urlsplit

import httptools

from openenv.client.network import Address, open_plain_socket, proxy_for

CONNECT_S = 10.0
# Servers may close an idle connection sooner (uvicorn after 5 s): `Endpoints.send` then takes another one.
IDLE_S = 20.0
BUFFER_LIMIT = 256 * 1024
_LOOK_S = 2.0  # the time limit of a look at a failed endpoint
FailureKind: TypeAlias = Literal["connect", "timeout", "broken", "garbage"]


class EndpointError(Exception):
    """The endpoint could not be reached, or its answer is incomplete or invalid."""

    def __init__(self, message: str, *, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind
        """`connect`, `timeout`, `broken` (the connection ended too early) or `garbage` (not HTTP)."""


class EndpointResponse:
    """Status and headers of a response, and its body in pieces."""

    def __init__(self, connection: _EndpointConnection, endpoints: Endpoints) -> None:
        self._connection = connection
        self._endpoints = endpoints
        self._closed = False
        self.status = connection.status
        self.headers = connection.headers
        # 47: zlib finds out itself whether it is gzip or deflate
        is_compressed = self.headers.get("content-encoding", "").lower() in ("gzip", "deflate")
        self._unzip = zlib.decompressobj(47) if is_compressed else None

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body, all buffered bytes at a time. The endpoint waits while the consumer is busy.

        Raises:
            EndpointError: The body is incomplete.
        """
        try:
            while (piece := await self._next_piece()) is not None:
                if piece:
                    yield piece
        finally:
            self.close()

    async def _next_piece(self) -> bytes | None:
        piece = await self._connection.next_piece()
        try:
            return piece if piece is None or self._unzip is None else self._unzip.decompress(piece)
        except zlib.error as exc:
            raise EndpointError(f"the response is not compressed as it says: {exc}", kind="garbage") from None

    async def read(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            EndpointError: The body is incomplete, or larger than the limit.
        """
        # Not by `pieces`: a generator costs more than the one piece of most bodies.
        data = bytearray()
        try:
            while (piece := await self._next_piece()) is not None:
                data += piece
                if len(data) > limit:
                    raise EndpointError(f"the response is larger than {limit} bytes", kind="garbage")
        finally:
            self.close()
        return bytes(data)

    def close(self) -> None:
        """Keep the connection if the response is complete; else close it, which stops the endpoint's sampling."""
        if not self._closed:
            self._closed = True
            self._endpoints.release(self._connection)


class _EndpointConnection(asyncio.Protocol):
    """One connection to an endpoint, for one request at a time. Bytes that arrive together are passed on together.

        idle -- send --> waiting -- status, headers --> headed -- end of the body --> complete -- keep-alive --> idle
                            |                             |                             +----------------------> closed
                            +-- hung up: "connect"        +-- hung up: "broken"
                            +-- silence: "timeout"        +-- silence: "timeout"

    `EndpointError.kind` has the words in quotes; after any of them the connection is closed.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: EndpointError | None = None
        self._is_paused = False
        self.is_closed = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._headed = self._complete = self._until_close = self._reusable = False

    def send(self, request: bytes, timeout_s: float) -> None:
        """Send a request."""
        assert self._transport is not None
        self._reset()
        self._timeout_s = timeout_s
        self._transport.write(request)

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self._headed:
            await self._wait()

    async def next_piece(self) -> bytes | None:
        """Return the buffered bytes of the body, once there are any; None at its end."""
        while not self._pieces:
            if self._complete:
                return None
            await self._wait()
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        # Backpressure from end to end: while the agent does not read, nothing is taken from here, the buffer fills,
        # reading pauses, and TCP holds the endpoint back.
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None and not self.is_closed:
                self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        # A plain timer: before Python 3.12, `wait_for` makes a task, here for every chunk.
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._timeout_s, self._time_out)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _time_out(self) -> None:
        if self._waiter is None or self._waiter.done():  # bytes came, but the loop was busy until now
            return
        self._fail(EndpointError(f"the endpoint said nothing for {self._timeout_s:g} s", kind="timeout"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: EndpointError) -> None:
        self._failure = self._failure or failure
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._failure)
        self.abort()

    @property
    def is_reusable(self) -> bool:
        """Return whether another request may be sent."""
        return self._complete and self._reusable and not self.is_closed

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None and not self.is_closed:
            self._transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._complete:  # bytes that nobody asked for: do not use the connection again
            self._reusable = False
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            if not self._complete:  # after the end, the error is in bytes that nobody asked for
                self._fail(EndpointError(f"the endpoint does not speak HTTP: {exc}", kind="garbage"))
                return
        if self._buffered > BUFFER_LIMIT and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        if self._pieces or self._headed:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._complete:
            return
        # RFC 9112, 6.3: a response with neither a length nor chunks ends with its connection.
        if self._headed and self._until_close and exc is None:
            self._complete = True
            self._wake()
        elif self._headed:
            self._fail(EndpointError("the endpoint hung up in the middle of its answer", kind="broken"))
        else:
            self._fail(EndpointError("the endpoint hung up without an answer", kind="connect"))

    # the parser calls these

    def on_message_begin(self) -> None:
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # RFC 9110, 15.2: 100 Continue and the like; the final response follows
            return
        self._headed = True
        has_length = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._until_close = not has_length and self.status not in (204, 304)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
            self._reusable = self._parser.should_keep_alive() and not self._until_close


# send():
#
#   an idle connection --> request --> head arrives -----------------------> EndpointResponse
#          |                              |
#          |                              +-- closed before a byte came ---> the next idle one, at last a new one
#          +-- none: a new connection --> request --> head arrives --------> EndpointResponse
#                                             |
#                                             +-- any failure -------------> EndpointError
#
# A request is sent twice only if its connection was an old one that had died: the endpoint cannot have seen it.


@functools.lru_cache(maxsize=256)  # all calls of a rollout have one address
def _place(url: str) -> tuple[Address, str, str]:
    """Return where to connect for an address, the value of the header `host`, and the target of the request."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    address = Address(parts.hostname or "", parts.port or (443 if secure else 80), "/", secure)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return address, parts.netloc.rpartition("@")[2], target


class Endpoints:
    """Connections to endpoints, kept open for the next call."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: dict[Address, list[_EndpointConnection]] = defaultdict(list)

    async def send(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
    ) -> EndpointResponse:
        """Send a request, and return the response when its status and headers have arrived.

        Raises:
            EndpointError: The endpoint did not answer.
        """
        address, host, target = _place(url)
        # `host` first, so that `extra_headers` of the model may replace it.
        fields = {"host": host, **headers, "content-length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        request = f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace") + body
        while True:
            idle = self._take(address)
            connection = idle or await self._connect(address, min(CONNECT_S, timeout_s))
            connection.send(request, timeout_s)
            try:
                await connection.head()
            except EndpointError as exc:
                # The endpoint may have closed a kept connection, which is not a failure. "connect" means that no byte
                # came back, so the agent cannot get anything twice.
                if idle is None or exc.kind != "connect":
                    raise
            except BaseException:  # cancelled: an answer is on its way, so the next call cannot use the connection
                connection.abort()
                raise
            else:
                return EndpointResponse(connection, self)

    def _take(self, address: Address) -> _EndpointConnection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()  # the latest: it is the least likely to be closed, and the others can end
            if not connection.is_closed and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, address: Address, timeout_s: float) -> _EndpointConnection:
        place = f"{address.host}:{address.port}"
        try:
            return await asyncio.wait_for(self._dial(address, timeout_s), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise EndpointError(f"no connection to {place} in {timeout_s:g} s", kind="connect") from None
        except (OSError, UnicodeError) as exc:  # errors of TLS and of the proxy are among them
            raise EndpointError(f"no connection to {place}: {exc}", kind="connect") from None

    async def is_gone(self, url: str) -> bool:
        """Return whether an address refuses connections; False if that is uncertain."""
        address, _, _ = _place(url)
        if proxy_for(address) is not None:
            return False
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), _LOOK_S)
        except (OSError, UnicodeError) as exc:
            # A name with several addresses fails with a text about all of them.
            numbers = re.findall(r"\[Errno (\d+)\]", str(exc))
            return bool(numbers) and all(int(number) == errno.ECONNREFUSED for number in numbers)
        except asyncio.TimeoutError:
            return False
        writer.close()
        return False

    # The environment's proxy (HTTPS_PROXY and the like) counts for endpoints as for every client of this package.
    async def _dial(self, address: Address, timeout_s: float) -> _EndpointConnection:
        loop = asyncio.get_running_loop()
        if address.secure and self._tls is None:
            self._tls = ssl.create_default_context()
        context = self._tls if address.secure else None
        if proxy_for(address) is None:
            _, connection = await loop.create_connection(
                lambda: _EndpointConnection(address), address.host, address.port, ssl=context
            )
            return connection
        # A tunnel through the proxy of the environment is made in a thread: it is rare, and short.
        sock = await loop.run_in_executor(None, open_plain_socket, address, timeout_s)
        sock.setblocking(False)
        name = address.host if address.secure else None
        _, connection = await loop.create_connection(
            lambda: _EndpointConnection(address), sock=sock, ssl=context, server_hostname=name
        )
        return connection

    def release(self, connection: _EndpointConnection) -> None:
        """Keep a connection for the next call if possible."""
        if connection.is_reusable:
            connection.idle_since = time.monotonic()
            self._idle[connection.address].append(connection)
        else:
            connection.abort()

    # Without a sweep, connections to endpoints of finished rollouts would stay until the endpoint closes them.
    def sweep(self) -> None:
        """Close connections that have been idle for long."""
        now = time.monotonic()
        for address, idle in list(self._idle.items()):
            for connection in idle:
                if now - connection.idle_since >= IDLE_S:
                    connection.abort()
            self._idle[address] = [connection for connection in idle if not connection.is_closed]

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
