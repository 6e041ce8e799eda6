"""HTTP proxies for addresses that are not local, from the usual environment variables.

Knows how to ask a proxy for a tunnel; must not know what goes through it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from .url import Address


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where a proxy listens, and what it wants to hear."""

    host: str
    port: int
    authorization: str | None


def proxy_for(address: Address) -> Proxy | None:
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
    return Proxy(parts.hostname, parts.port or 80, authorization)


def tunnel_request(address: Address, proxy: Proxy) -> bytes:
    """The request for a tunnel."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    place = f"{host}:{address.port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
