"""TCP and TLS connections to a server, through an HTTP proxy where the environment names one.

Knows sockets and proxies; must not know WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import time
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..errors import ConnectFailed
from .url import Address

READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """Where a proxy listens, and the `Proxy-Authorization` header it requires."""

    host: str
    port: int
    authorization: str | None


def proxy_for(address: Address) -> HttpProxy | None:
    """Return the proxy to use (`HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY`), or None to connect directly."""
    if address.is_local or proxy_bypass(address.host):
        return None
    url = getproxies().get("https" if address.secure else "http")
    if not url:
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        return None
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return HttpProxy(parts.hostname, parts.port or 80, authorization)


def tunnel_request(address: Address, proxy: HttpProxy) -> bytes:
    """Return the CONNECT request for a tunnel to an address."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    target = f"{host}:{address.port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def open_socket(address: Address, timeout_s: float) -> socket.socket:
    """Connect to a server.

    Raises:
        OSError: The server cannot be reached.
        ConnectFailed: The proxy refuses.
    """
    sock = open_plain_socket(address, timeout_s)
    if not address.secure:
        return sock
    try:
        return ssl.create_default_context().wrap_socket(sock, server_hostname=address.host)
    except BaseException:
        sock.close()
        raise


def open_plain_socket(address: Address, timeout_s: float) -> socket.socket:
    """Connect without encryption, which the caller adds."""
    proxy = proxy_for(address)
    target = (address.host, address.port) if proxy is None else (proxy.host, proxy.port)
    sock = socket.create_connection(target, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if proxy is not None:
            sock.sendall(tunnel_request(address, proxy))
            response = b""
            while b"\r\n\r\n" not in response:
                response += read_before(sock, time.monotonic() + timeout_s)
            if b" 200" not in response.split(b"\r\n", 1)[0]:
                raise ConnectFailed(f"the proxy {proxy.host}:{proxy.port} refused: {response[:100]!r}")
    except BaseException:
        sock.close()
        raise
    return sock


def read_before(sock: socket.socket, deadline: float) -> bytes:
    """Read once, before a moment of the monotonic clock.

    Raises:
        OSError: Nothing came.
        ConnectFailed: The server closed the connection.
    """
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    data = sock.recv(READ_BYTES)
    if not data:
        raise ConnectFailed("the server closed the connection during the handshake", is_transient=True)
    return data


def connect_failure(address: Address, exc: BaseException, timeout_s: float) -> ConnectFailed:
    """Return the error for a server that could not be reached; it says whether another attempt may help."""
    if isinstance(exc, ConnectFailed):
        return ConnectFailed(f"Failed to connect to {address.url}: {exc}", is_transient=exc.is_transient)
    detail = str(exc) or f"no answer within {timeout_s:g} s"
    return ConnectFailed(f"Failed to connect to {address.url}: {detail}", is_transient=_is_transient(exc))


def _is_transient(exc: BaseException) -> bool:
    if isinstance(exc, socket.gaierror):
        return exc.errno == socket.EAI_AGAIN
    if isinstance(exc, ssl.SSLError):  # a connection that was cut, but not a wrong certificate or no TLS at all
        return isinstance(exc, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
    return isinstance(exc, (OSError, asyncio.TimeoutError))
