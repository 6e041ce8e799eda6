"""The endpoints' side of the proxy: HTTP/1.1 requests out, responses in as they come, over TCP or TLS.

Knows connections, framing and timeouts. Must not know dialects or rollouts. What comes is handed on in the same pass of
the event loop in which it came.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from openenv.client.tcp import open_plain_socket, proxy_for
from openenv.client.url import Address

CONNECT_S = 10.0
IDLE_S = 20.0
_BUFFER_LIMIT = 1024 * 1024


class EndpointError(Exception):
    """The endpoint could not be reached, or did not answer properly."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
        """`connect`, `timeout`, `broken` (the connection ended too early) or `garbage` (not HTTP)."""


@dataclass(slots=True)
class ResponseHead:
    """Status and headers of a response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class EndpointExchange:
    """One request and its response. `head` comes first, then `read` or `relay` takes the body."""

    def __init__(self, connection: _EndpointConnection, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[ResponseHead] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()
        self._connection = connection
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._consumer: Callable[[bytes], None] | None = None
        self._unzip: zlib._Decompress | None = None
        self._over = False
        self._timeout_s = timeout_s
        self._active_at = time.monotonic()
        self._timer = loop.call_later(timeout_s, self._check)

    async def read(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            EndpointError: it did not come whole, or is larger than the limit.
        """
        pieces: list[bytes] = []
        size = 0

        def take(data: bytes) -> None:
            nonlocal size
            size += len(data)
            if size > limit:
                self.fail(EndpointError(f"the response is larger than {limit} bytes", kind="garbage"))
            else:
                pieces.append(data)

        await self.relay(take)
        return b"".join(pieces)

    async def relay(self, consumer: Callable[[bytes], None]) -> None:
        """Hand on the body piece by piece, as it comes, and return at its end.

        Raises:
            EndpointError: it did not come whole.
        """
        self._consumer = consumer
        if self._buffer:
            data, self._buffer = b"".join(self._buffer), []
            consumer(data)
            self.pause(False)
        await self._done

    def pause(self, is_paused: bool) -> None:
        """Stop reading from the endpoint, or go on."""
        if self._over:
            return
        if is_paused:
            self._connection.pause()
        else:
            self._active_at = time.monotonic()
            self._connection.resume()

    def cancel(self) -> None:
        """Hang up: the endpoint stops sampling."""
        self.fail(EndpointError("the call was cancelled", kind="cancelled"))

    # the connection calls these

    def began(self, head: ResponseHead) -> None:
        """Take status and headers."""
        encoding = head.headers.get("content-encoding", "").lower()
        if encoding in ("gzip", "deflate"):
            self._unzip = zlib.decompressobj(47)
        self._active_at = time.monotonic()
        if not self.head.done():
            self.head.set_result(head)

    def came(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._active_at = time.monotonic()
        if self._unzip is not None:
            try:
                data = self._unzip.decompress(data)
            except zlib.error as exc:
                self.fail(EndpointError(f"the response is not compressed as it says: {exc}", kind="garbage"))
                return
        if not data or self._done.done():
            return
        if self._consumer is not None:
            self._consumer(data)
            return
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered > _BUFFER_LIMIT:
            self._connection.pause()

    def ended(self) -> None:
        """Take note of the proper end."""
        self._over = True
        self._timer.cancel()
        if not self._done.done():
            self._done.set_result(None)

    def fail(self, exc: EndpointError) -> None:
        """End with an error; the connection is of no more use."""
        if self._over:  # the connection may be another's by now
            return
        self._over = True
        self._timer.cancel()
        for future in (self.head, self._done):
            if not future.done():
                future.set_exception(exc)
                future.exception()  # not everybody waits for both
        self._connection.abort()

    def _check(self) -> None:
        left = self._active_at + self._timeout_s - time.monotonic()
        if left <= 0 and not self._connection.paused:
            self.fail(EndpointError(f"the endpoint said nothing for {self._timeout_s:g} s", kind="timeout"))
        else:
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.05), self._check)


class _EndpointConnection(asyncio.Protocol):
    """One connection to an endpoint; one exchange at a time."""

    def __init__(self, address: Address, release: Callable[[_EndpointConnection], None]) -> None:
        self.address = address
        self.idle_since = 0.0
        self.paused = False
        self.closed = False
        self._release = release
        self._transport: asyncio.Transport | None = None
        self._exchange: EndpointExchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head = ResponseHead()
        self._pieces: list[bytes] = []
        self._headed = self._complete = self._until_close = self._reusable = False

    def begin(self, request: bytes, timeout_s: float) -> EndpointExchange:
        """Send a request."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._headed = self._complete = self._until_close = self._reusable = False
        self._exchange = EndpointExchange(self, timeout_s)
        self._transport.write(request)
        return self._exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody asked: not a connection to go on with
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            if not self._complete:
                exchange.fail(EndpointError(f"the endpoint does not speak HTTP: {exc}", kind="garbage"))
                return
        if self._pieces:  # all that came at once is handed on at once
            pieces, self._pieces = self._pieces, []
            exchange.came(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._complete:
            self._finish(exchange)

    def eof_received(self) -> bool | None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._headed and self._until_close and exc is None:
            exchange.ended()
            return
        when = "in the middle of its answer" if self._headed else "without an answer"
        exchange.fail(EndpointError(f"the endpoint hung up {when}", kind="broken" if self._headed else "connect"))

    def on_message_begin(self) -> None:
        self._head = ResponseHead()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head.status = self._parser.get_status_code()
        if self._head.status < 200:  # 100 Continue and the like: the real one follows
            return
        self._headed = True
        headers = self._head.headers
        has_length = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        self._until_close = not has_length and self._head.status not in (204, 304)
        if self._exchange is not None:
            self._exchange.began(self._head)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
            self._reusable = self._parser.should_keep_alive() and not self._until_close

    def _finish(self, exchange: EndpointExchange) -> None:
        self._exchange = None
        self.resume()
        exchange.ended()
        if self._reusable and not self.closed:
            self._release(self)
        else:
            self.abort()

    def pause(self) -> None:
        """Stop reading."""
        if self._transport is not None and not self.paused and not self.closed:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self._transport is not None and self.paused and not self.closed:
            self._transport.resume_reading()
        self.paused = False

    def abort(self) -> None:
        """Close at once."""
        self._exchange = None
        if self._transport is not None and not self.closed:
            self._transport.abort()


class Endpoints:
    """Connections to endpoints, kept open for the next call."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: dict[Address, list[_EndpointConnection]] = defaultdict(list)

    async def send(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
    ) -> tuple[EndpointExchange, ResponseHead]:
        """Send a request, and return the exchange once status and headers are there.

        Raises:
            EndpointError: there is no answer.
        """
        exchange, is_fresh = await self._begin(method, url, body, headers, timeout_s)
        try:
            return exchange, await exchange.head
        except EndpointError as exc:
            if is_fresh or exc.kind != "connect":
                raise
        except BaseException:
            exchange.cancel()
            raise
        # A connection that was kept may have been closed at the other end by now: that is no failure of the endpoint.
        exchange, _ = await self._begin(method, url, body, headers, timeout_s, fresh=True)
        try:
            return exchange, await exchange.head
        except BaseException:
            exchange.cancel()
            raise

    async def _begin(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float, *, fresh: bool = False
    ) -> tuple[EndpointExchange, bool]:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        address = Address(parts.hostname or "", parts.port or (443 if tls else 80), "/", tls)
        kept = None if fresh else self._take(address)
        connection = kept or await self._connect(address, min(CONNECT_S, timeout_s))
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        host = parts.netloc.rpartition("@")[2]
        head = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\n{lines}content-length: {len(body)}\r\n\r\n"
        return connection.begin(head.encode("latin-1", "replace") + body, timeout_s), kept is None

    def _take(self, address: Address) -> _EndpointConnection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.closed and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, address: Address, timeout_s: float) -> _EndpointConnection:
        place = f"{address.host}:{address.port}"
        try:
            return await asyncio.wait_for(self._dial(address, timeout_s), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise EndpointError(f"no connection to {place} in {timeout_s:g} s", kind="connect") from None
        except (OSError, UnicodeError) as exc:  # what TLS and the proxy complain about is among them
            raise EndpointError(f"no connection to {place}: {exc}", kind="connect") from None

    async def _dial(self, address: Address, timeout_s: float) -> _EndpointConnection:
        loop = asyncio.get_running_loop()
        context = self._context() if address.secure else None
        name = address.host if address.secure else None
        if proxy_for(address) is None:
            _, connection = await loop.create_connection(
                lambda: _EndpointConnection(address, self._release), address.host, address.port, ssl=context
            )
            return connection
        # The tunnel is dug in a thread: it is rare, and short.
        sock = await loop.run_in_executor(None, open_plain_socket, address, timeout_s)
        sock.setblocking(False)
        _, connection = await loop.create_connection(
            lambda: _EndpointConnection(address, self._release), sock=sock, ssl=context, server_hostname=name
        )
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _release(self, connection: _EndpointConnection) -> None:
        connection.idle_since = time.monotonic()
        self._idle[connection.address].append(connection)

    def sweep(self) -> None:
        """Close connections that have been idle for long."""
        now = time.monotonic()
        for address, idle in list(self._idle.items()):
            kept = []
            for connection in idle:
                if connection.closed or now - connection.idle_since >= IDLE_S:
                    connection.abort()
                else:
                    kept.append(connection)
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
