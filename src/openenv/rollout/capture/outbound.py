"""The endpoints' side of the proxy: HTTP/1.1 requests out, responses in as they come, over TCP or TLS.

Translates `httpcore2` into what a call needs to know. Must not know dialects or rollouts.
"""

from __future__ import annotations

import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import httpcore2

from openenv.client.tcp import proxy_for, tunnel_request
from openenv.client.url import Address

CONNECT_S = 10.0
IDLE_S = 20.0
FailureKind: TypeAlias = Literal["connect", "timeout", "broken", "garbage"]


class EndpointError(Exception):
    """The endpoint could not be reached, or did not answer properly."""

    def __init__(self, message: str, *, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind
        """`connect`, `timeout`, `broken` (the connection ended too early) or `garbage` (not HTTP)."""


class EndpointResponse:
    """Status and headers of a response, and its body as it comes."""

    def __init__(self, response: httpcore2.Response, timeout_s: float) -> None:
        self._response = response
        self._timeout_s = timeout_s
        self.status = response.status
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body piece by piece. Endpoints are held back while the consumer is busy.

        Raises:
            EndpointError: it did not come whole.
        """
        # 47: zlib finds out itself whether it is gzip or deflate
        is_compressed = self.headers.get("content-encoding", "").lower() in ("gzip", "deflate")
        unzip = zlib.decompressobj(47) if is_compressed else None
        try:
            async for piece in self._response.aiter_stream():
                data = piece if unzip is None else unzip.decompress(piece)
                if data:
                    yield data
        except zlib.error as exc:
            raise EndpointError(f"the response is not compressed as it says: {exc}", kind="garbage") from None
        except httpcore2.TimeoutException:
            raise EndpointError(f"the endpoint said nothing for {self._timeout_s:g} s", kind="timeout") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError):
            raise EndpointError("the endpoint hung up in the middle of its answer", kind="broken") from None
        finally:
            await self.close()  # before the agent has its answer, so that its next call finds the connection free

    async def read(self, limit: int) -> bytes:
        """Return the whole body, and give the connection back.

        Raises:
            EndpointError: it did not come whole, or is larger than the limit.
        """
        data = bytearray()
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                data += piece
                if len(data) > limit:
                    raise EndpointError(f"the response is larger than {limit} bytes", kind="garbage")
        return bytes(data)

    async def close(self) -> None:
        """Keep the connection of a response that came whole; close any other, which stops the endpoint's sampling."""
        await self._response.aclose()


@dataclass(slots=True)
class _Progress:
    """How far a request got, as httpcore2 reports it."""

    is_fresh: bool = False
    """Whether a connection was made for it."""
    is_sent: bool = False

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take note of an event."""
        self.is_fresh = self.is_fresh or event == "connection.connect_tcp.started"
        self.is_sent = self.is_sent or event == "http11.send_request_headers.started"


class Endpoints:
    """Connections to endpoints, kept open for the next call."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._pools: dict[bool, httpcore2.AsyncConnectionPool] = {}

    async def send(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
    ) -> EndpointResponse:
        """Send a request, and return the response once status and headers are there.

        Raises:
            EndpointError: there is no answer.
        """
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        host = parts.netloc.rpartition("@")[2]
        fields = {"host": host, **headers, "content-length": str(len(body))}
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in fields.items()]
        timeout = {"connect": min(CONNECT_S, timeout_s), "read": timeout_s, "write": timeout_s}
        while True:
            progress = _Progress()
            extensions = {"timeout": timeout, "trace": progress.trace}
            try:
                request = httpcore2.Request(method, url, headers=raw, content=body, extensions=extensions)
                response = await self._pool(secure).handle_async_request(request)
            except (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError, ValueError) as exc:
                failure = _failure(exc, progress, place=host, timeout_s=timeout_s)
                # The endpoint may have closed a kept connection by now, which is no failure of its own.
                if failure.kind == "connect" and progress.is_sent and not progress.is_fresh:
                    continue
                raise failure from None
            return EndpointResponse(response, timeout_s)

    def _pool(self, secure: bool) -> httpcore2.AsyncConnectionPool:
        if secure not in self._pools:
            self._pools[secure] = httpcore2.AsyncConnectionPool(
                ssl_context=(self._tls or ssl.create_default_context()) if secure else None,
                max_connections=None,
                keepalive_expiry=IDLE_S,
                network_backend=_ProxiedNetwork(secure),
            )
        return self._pools[secure]

    async def close(self) -> None:
        """Close every connection."""
        for pool in self._pools.values():
            await pool.aclose()


def _failure(exc: Exception, progress: _Progress, *, place: str, timeout_s: float) -> EndpointError:
    if not progress.is_sent:
        why = f" in {min(CONNECT_S, timeout_s):g} s" if isinstance(exc, httpcore2.TimeoutException) else f": {exc}"
        return EndpointError(f"no connection to {place}{why}", kind="connect")
    if isinstance(exc, httpcore2.TimeoutException):
        return EndpointError(f"the endpoint said nothing for {timeout_s:g} s", kind="timeout")
    if isinstance(exc, httpcore2.ProtocolError) and exc.__cause__ is not None:  # it is h11's: not an early end
        return EndpointError(f"the endpoint does not speak HTTP: {exc}", kind="garbage")
    return EndpointError("the endpoint hung up without an answer", kind="connect")


class _ProxiedNetwork(httpcore2.AnyIOBackend):
    """Connects through the HTTP proxy of the environment where there is one: by a tunnel, also for plain HTTP.

    httpcore2's own proxy connections would send plain requests to the proxy whole, the endpoint's key with them.
    """

    def __init__(self, secure: bool) -> None:
        self._secure = secure

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect, and ask the proxy for a tunnel."""
        address = Address(host, port, "/", self._secure)
        proxy = proxy_for(address)
        if proxy is None:
            return await super().connect_tcp(host, port, timeout, local_address, socket_options)
        stream = await super().connect_tcp(proxy.host, proxy.port, timeout, local_address, socket_options)
        try:
            await stream.write(tunnel_request(address, proxy), timeout)
            answer = b""
            while b"\r\n\r\n" not in answer:
                data = await stream.read(4096, timeout)
                answer += data
                if not data or (b"\r\n" in answer and b" 200" not in answer.split(b"\r\n", 1)[0]):
                    raise httpcore2.ConnectError(f"the proxy {proxy.host}:{proxy.port} refused: {answer[:100]!r}")
        except BaseException:
            await stream.aclose()
            raise
        return stream
