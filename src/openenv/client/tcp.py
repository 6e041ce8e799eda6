"""Plain and encrypted sockets to a server, through a proxy where one is asked for.

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
from .options import READ_BYTES
from .url import Address

# proxy: HTTP proxies for addresses that are not local, from the usual environment variables.
#
# Knows how to ask a proxy for a tunnel; must not know what goes through it.


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """Where a proxy listens, and what it wants to hear."""

    host: str
    port: int
    authorization: str | None


def proxy_for(address: Address) -> HttpProxy | None:
    """Return the proxy to use, or None to connect directly."""
    if address.is_local or proxy_bypass(address.host):
        return None
    proxies = getproxies()
    url = proxies.get("https" if address.secure else "http")
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
    """The request for a tunnel."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    place = f"{host}:{address.port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def connect_failure(address: Address, exc: BaseException, timeout_s: float) -> ConnectFailed:
    """Say that a server could not be reached, and whether another try may help."""
    if isinstance(exc, ConnectFailed):
        return ConnectFailed(f"Failed to connect to {address.url}: {exc}", is_transient=exc.is_transient)
    detail = str(exc) or f"no answer within {timeout_s:g} s"
    return ConnectFailed(f"Failed to connect to {address.url}: {detail}", is_transient=_is_transient(exc))


def _is_transient(exc: BaseException) -> bool:
    if isinstance(exc, socket.gaierror):
        return exc.errno == socket.EAI_AGAIN
    if isinstance(exc, ssl.SSLError):  # what is cut short, but not a wrong certificate or no TLS at all
        return isinstance(exc, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
    return isinstance(exc, (OSError, asyncio.TimeoutError))


def open_socket(address: Address, timeout_s: float) -> socket.socket:
    """Connect to a server.

    Raises:
        OSError: It cannot be reached.
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
    """Connect without encryption, which is the caller's."""
    proxy = proxy_for(address)
    place = (address.host, address.port) if proxy is None else (proxy.host, proxy.port)
    sock = socket.create_connection(place, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if proxy is not None:
            sock.sendall(tunnel_request(address, proxy))
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += read_before(sock, time.monotonic() + timeout_s)
            if b" 200" not in answer.split(b"\r\n", 1)[0]:
                raise ConnectFailed(f"the proxy {proxy.host}:{proxy.port} refused: {answer[:100]!r}")
    except BaseException:
        sock.close()
        raise
    return sock


def read_before(sock: socket.socket, deadline: float) -> bytes:
    """Read what comes first, before a moment of the monotonic clock.

    Raises:
        OSError: Nothing came.
        ConnectFailed: The server hung up.
    """
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    data = sock.recv(READ_BYTES)
    if not data:
        raise ConnectFailed("the server closed the connection during the handshake", is_transient=True)
    return data
