"""Which web pages may use a server: its own, and those that a setting names.

Browsers let any page send requests to a server on loopback or in a private network, and say in `Origin` where the page
is from. Programs send no such header and are not concerned. Knows ASGI and headers; must not know routes or sessions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from .asgi import Scope, header

_DEFAULT_PORTS = {"http": 80, "https": 443}


class OriginPolicy:
    """Tells pages of this server from foreign ones.

    Args:
        allowed: Origins that may use the server as well, such as `https://lab.example`; `*` allows all.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    def refuses(self, scope: Scope) -> bool:
        """Say whether a request comes from a page that may not make it."""
        origin = header(scope, b"origin")
        if origin is None or "*" in self._allowed or origin.lower() in self._allowed:
            return False
        host = header(scope, b"host") or ""
        return not _is_same(origin, host) or _is_rebound(scope, host)

    def when_looked_at(self, *, acts: bool) -> OriginPolicy:
        """Return the policy for what is read with GET, where browsers do not say where a page of the same name is from.

        Args:
            acts: Whether pages of other origins are refused as well, as by this policy.
        """
        return _Looking(self._allowed, also=self if acts else None)


class _Looking(OriginPolicy):
    """Refuses pages that have reached loopback under a name that its owner has let point here.

    Only browsers are concerned: all of them name languages, and programs do not. `Sec-Fetch-Site` is no sign of them
    but one of safety: it is sent to addresses with TLS and to loopback's own names, where no other name can be.
    """

    def __init__(self, allowed: Iterable[str], *, also: OriginPolicy | None) -> None:
        super().__init__(allowed)
        self._also = also

    def refuses(self, scope: Scope) -> bool:
        """Say whether a request comes from a page that may not make it."""
        if self._also is not None and self._also.refuses(scope):
            return True
        if header(scope, b"accept-language") is None or header(scope, b"sec-fetch-site") is not None:
            return False
        host = header(scope, b"host") or ""
        if "*" in self._allowed or any(_is_same(origin, host) for origin in self._allowed):
            return False
        return _is_rebound(scope, host)


def _is_rebound(scope: Scope, host: str) -> bool:
    """Whether a page reached loopback under another name: its owner has let that name point here (DNS rebinding)."""
    address = (scope.get("server") or ("",))[0]
    if not _is_loopback(address):
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return True
    return not (_is_loopback(name) or _is_address(name))


def _is_address(name: str) -> bool:
    """Whether a name is an address, which points nowhere else."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_same(origin: str, host: str) -> bool:
    """Compare host and port; where none is written, the port is the default of the page's scheme.

    The scheme of the request is not asked: behind a proxy that ends TLS it is not the one that the browser sees.
    """
    try:
        page, own = urlsplit(origin), urlsplit(f"//{host}")
        default = _DEFAULT_PORTS[page.scheme]
        return bool(own.hostname) and (page.hostname, page.port or default) == (own.hostname, own.port or default)
    except (KeyError, ValueError):  # "null", the schemes of extensions and files, and nonsense
        return False
