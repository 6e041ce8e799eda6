"""Addresses: what users write, and what a socket needs.

Knows URL forms only.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit


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
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as users know it."""
        return f"{'wss' if self.secure else 'ws'}://{self.authority}{self.target}"

    @property
    def is_local(self) -> bool:
        """Whether this is the own machine, which no proxy can reach for us."""
        if self.host == "localhost" or self.host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


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
