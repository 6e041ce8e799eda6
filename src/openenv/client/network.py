"""How a client reaches a server: its address, the limits and headers of a connection, TCP and TLS, HTTP proxies.

Must not know WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, get_args
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from openenv.errors import AccessDenied, ConnectFailed
from openenv.protocol.addresses import is_loopback
from openenv.protocol.redaction import redacted
from openenv.settings import client_token

READ_BYTES = 65_536

NO_SERVER = "Is the server running, at this address? `openenv serve` starts one."
ProtocolChoice = Literal["auto", "v1", "v2"]
PROTOCOLS: Final[tuple[str, ...]] = get_args(ProtocolChoice)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Limits and headers of a connection, times in seconds, and the subprotocols it offers, the preferred one first."""

    connect_timeout_s: float = 10.0
    retry_refused_s: float = 2.0
    message_timeout_s: float | None = 60.0
    max_message_bytes: int = 100 * 1024 * 1024
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # a token may be among them
    protocol: ProtocolChoice = "v1"
    subprotocols: tuple[str, ...] = ()


def with_token(headers: Mapping[str, str] | None, token: str | None) -> dict[str, str]:
    """Return headers with a bearer token: the argument, else the header that is there, else `OPENENV_TOKEN`."""
    merged = dict(headers or {})
    present = next((name for name in merged if name.lower() == "authorization"), None)
    if token is None and present is None:
        token = client_token()
    if token is not None:
        merged.pop(present or "", None)
        merged["Authorization"] = f"Bearer {token}"
    return merged


# -- addresses --------------------------------------------------------------------------------------------------------


def convert_to_ws_url(url: str) -> str:
    """Turn `http(s)://`, `ws(s)://` or a bare host into a WebSocket URL without a trailing slash."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        return f"ws://{scheme.rstrip('/')}"
    mapped = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(scheme.lower(), scheme)
    return f"{mapped}://{rest.rstrip('/')}"


def socket_url(base_url: object) -> str:
    """Return the WebSocket address of the server that a user has named, with or without `/ws`.

    Raises:
        ValueError: It is not an address.
    """
    url = convert_to_ws_url(base_url) if isinstance(base_url, str) else ""
    try:
        path = parse_ws_url(url).target
    except ValueError:
        raise ValueError(
            f"base_url must be the address of a server, such as 'http://localhost:8000', not {base_url!r}"
        ) from None
    return url if path.endswith("/ws") else f"{url}/ws"


def http_url(base_url: object) -> str:
    """Return the HTTP address of the same server, without a slash at the end; raises as above."""
    return "http" + socket_url(base_url).removeprefix("ws").removesuffix("/ws")


def hf_space_subdomain(repo_id: str) -> str:
    """Return the subdomain of a Hugging Face Space: `Org/My_Space` is `org-my-space`."""
    cleaned = "".join(char if char.isascii() and char.isalnum() else "-" for char in repo_id.lower())
    return "-".join(part for part in cleaned.split("-") if part)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, and the path to request there."""

    host: str
    port: int
    target: str
    secure: bool

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default_port = 443 if self.secure else 80
        return host if self.port == default_port else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as users know it."""
        return f"{'wss' if self.secure else 'ws'}://{self.authority}{self.target}"

    @property
    def shown(self) -> str:
        """The address for messages, which programs log: without tokens in its query."""
        return redacted(self.url)

    @property
    def is_local(self) -> bool:
        """Whether this is the own machine, which no proxy can reach for us."""
        return is_loopback(self.host) or self.host.endswith(".localhost")


def parse_ws_url(url: str) -> Address:
    """Split a WebSocket URL.

    Raises:
        ValueError: It is not one.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ValueError(f"not a WebSocket address: {url!r}")
    secure = parts.scheme == "wss"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.hostname, parts.port or (443 if secure else 80), target, secure)


# -- sockets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """A proxy's address, and the `Proxy-Authorization` header it requires."""

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
                data = sock.recv(READ_BYTES)
                if not data:
                    raise closed_in_handshake()
                response += data
            if b" 200" not in response.split(b"\r\n", 1)[0]:
                raise ConnectFailed(f"the proxy {proxy.host}:{proxy.port} refused: {response[:100]!r}")
    except BaseException:
        sock.close()
        raise
    return sock


def closed_in_handshake() -> ConnectFailed:
    """Return the error for a server, or a proxy, that hangs up instead of answering: it may be about to start."""
    return ConnectFailed("the server closed the connection during the handshake", is_transient=True)


@contextmanager
def connecting(address: Address, timeout_s: float) -> Iterator[None]:
    """Raise what goes wrong inside as `ConnectFailed`, with the address; a refused token stays `AccessDenied`."""
    try:
        yield
    except AccessDenied:
        raise
    except (OSError, UnicodeError, asyncio.TimeoutError) as exc:
        raise connect_failure(address, exc, timeout_s) from (None if isinstance(exc, ConnectFailed) else exc)


def connect_failure(address: Address, exc: BaseException, timeout_s: float) -> ConnectFailed:
    """Return the error for a server that could not be reached; it says whether another attempt may help."""
    if isinstance(exc, ConnectFailed):
        return ConnectFailed(f"Failed to connect to {address.shown}: {exc}", is_transient=exc.is_transient)
    detail = str(exc) or f"no answer within {timeout_s:g} s"
    asks = f". {NO_SERVER}" if isinstance(exc, ConnectionRefusedError) else ""
    return ConnectFailed(f"Failed to connect to {address.shown}: {detail}{asks}", is_transient=_is_transient(exc))


def _is_transient(exc: BaseException) -> bool:
    if isinstance(exc, socket.gaierror):
        return exc.errno == socket.EAI_AGAIN
    if isinstance(exc, ssl.SSLError):  # a connection that was cut, but not a wrong certificate or no TLS at all
        return isinstance(exc, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
    return isinstance(exc, (OSError, asyncio.TimeoutError))
