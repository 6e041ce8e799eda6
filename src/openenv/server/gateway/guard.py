"""Checks requests before a gateway relays them, and adds fields to their heads.

Servers check origins, hosts and tokens themselves, and the gateway passes `Host`, `Origin`, `Authorization` and cookies
on unchanged. It repeats the checks because a server behind it cannot see which address the client has used: a page may
reach a gateway on loopback under a foreign name (DNS rebinding), and a gateway on an open address must ask for a token
even if its servers listen on loopback and ask for none. Knows heads; must not know servers or connections.

    head --> OriginPolicy: foreign page, foreign host? --> 403 FOREIGN_ORIGIN
         --> AccessPolicy: no or unknown token ----------> 401 UNAUTHORIZED
         --> `forwarded`: x-forwarded-for, via ----------> the server, which checks roles
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from starlette.types import Message

from ..access import FOREIGN_ORIGIN, GATEWAY_NAME, UNAUTHORIZED, AccessPolicy, Area, OriginPolicy, Role, area_of
from ..access import is_of_page as is_page_path
from ..asgi import Scope
from ..request_head import UPGRADE, RequestHead, field_pattern
from ..web.page_routes import PageLogin

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOGIN_PATHS: Final = frozenset({"/web/login", "/web/logout"})
MOST_LOGIN_BYTES: Final = 16 * 1024
_READS: Final = (b"GET", b"HEAD")
_STATIC: Final = "/web/static/"
_DOCUMENTS: Final = frozenset({"/docs", "/redoc", "/openapi.json"})  # browsers open them, so `?token=` is valid there
_FROM_PAGE: Final = re.compile(rb"\r\n(?:origin|accept-language):", re.IGNORECASE)
_PREFLIGHT: Final = field_pattern(b"access-control-request-method")
_CLIENT: Final = field_pattern(b"x-forwarded-for")
_CLIENT_FIELDS: Final = re.compile(rb"\r\nx-forwarded-for:[^\r]*", re.IGNORECASE)
_OTHER_CLIENT_FIELDS: Final = re.compile(rb"\r\n(?:forwarded|x-real-ip):[^\r]*", re.IGNORECASE)


class GatewayRefusal(Exception):
    """The gateway refuses a request.

    Args:
        status: The HTTP status.
        code: The code in the body.
        text: The reason.
        headers: More lines of the response's head.
    """

    def __init__(self, status: int, code: str, text: str, *, headers: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.headers = headers


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of addresses such as `10.0.0.7` and `10.0.0.0/8`.

    Raises:
        ValueError: A text is not an address.
    """
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError as exc:
        raise ValueError(f"{exc}; write addresses such as 10.0.0.7 or 10.0.0.0/8") from None


class GatewayGuard:
    """Checks requests at one address.

    Args:
        access: The tokens; an open policy leaves the check to the servers.
        origins: The web pages that may use the gateway.
        trusted_proxies: The proxies in front of the gateway whose `X-Forwarded-For` is true.
    """

    def __init__(
        self,
        access: AccessPolicy | None = None,
        origins: OriginPolicy | None = None,
        trusted_proxies: Sequence[Network] = (),
    ) -> None:
        self.access = access or AccessPolicy()
        self._origins = origins or OriginPolicy()
        self._trusted = trusted_proxies
        self._login = PageLogin(lambda: self.access, lambda code: None)

    @property
    def has_roles(self) -> bool:
        """Whether some token has fewer rights than the orchestrator's; then servers must check roles."""
        return self.access.has(Role.AGENT) or self.access.has(Role.OBSERVER)

    def admit(self, head: RequestHead, here: Any) -> Role:
        """Return the role of a request.

        Args:
            head: The request.
            here: The address at which it has arrived, as (host, port).

        Raises:
            GatewayRefusal: It may not pass.
        """
        is_socket = UPGRADE.search(head.raw) is not None
        if head.method == b"OPTIONS" and _PREFLIGHT.search(head.raw):
            return Role.ORCHESTRATOR  # a browser asks whether it may send a request; it cannot add a token
        area = _area(head, is_socket=is_socket)
        if _FROM_PAGE.search(head.raw):
            self._check_origin(head, here, area, is_socket=is_socket)
        if self.access.is_open or area is Area.OPEN:
            return Role.ORCHESTRATOR
        by_address = area in (Area.TOOLS, Area.ANY_ROLE)
        role = self.access.identify(scope_of(head, here), by_address=by_address, by_cookie=is_page_path(head.path))
        if role is None:
            text = "This gateway requires a valid token: send 'Authorization: Bearer TOKEN'."
            raise GatewayRefusal(401, UNAUTHORIZED, text, headers="www-authenticate: Bearer\r\n")
        return role

    def _check_origin(self, head: RequestHead, here: Any, area: Area, *, is_socket: bool) -> None:
        scope = scope_of(head, here)
        reads = head.method in _READS and not is_socket
        # As in `AccessGate.enclose`: a foreign page may send GET requests, because its browser hides the answers.
        acts = not reads or head.path.startswith("/sessions")
        if (acts and self._origins.refuses(scope)) or (
            reads and area is not Area.OPEN and self._origins.refuses_reader(scope)
        ):
            text = "Pages of this origin or host may not use this gateway; see OPENENV_ALLOWED_ORIGINS."
            raise GatewayRefusal(403, FOREIGN_ORIGIN, text)

    def answers_login(self, head: RequestHead) -> bool:
        """Return whether the gateway answers a login or logout: it has tokens, which its servers may not know."""
        return head.path in LOGIN_PATHS and head.method == b"POST" and not self.access.is_open

    async def login(self, head: RequestHead, body: bytes, here: Any) -> tuple[int, bytes, str]:
        """Answer a login or logout; return status, body and more lines of the head."""
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        handler = self._login.login if head.path == "/web/login" else self._login.logout
        await handler(scope_of(head, here), receive, send)
        begin, end = messages
        fields = [(name, value) for name, value in begin["headers"] if name == b"set-cookie"]
        lines = "".join(f"{name.decode()}: {value.decode('latin-1')}\r\n" for name, value in fields)
        return begin["status"], end["body"], f"cache-control: no-store\r\n{lines}"

    def forwarded(self, head: RequestHead, peer: str) -> bytes:
        """Return the head for a server, with the client's address.

        A list of addresses is only true if a trusted proxy has sent it; otherwise it starts anew. `X-Forwarded-Proto`
        passes in any case: servers use it for the cookie and the address on the page of that same client.
        """
        raw, chain = head.raw, [peer.encode("latin-1")]
        if self._is_trusted(peer):
            chain[:0] = [value.strip() for value in _CLIENT.findall(raw)]
        else:
            raw = _OTHER_CLIENT_FIELDS.sub(b"", raw)
        raw = _CLIENT_FIELDS.sub(b"", raw)
        return raw[:-2] + b"x-forwarded-for: " + b", ".join(chain) + b"\r\nvia: 1.1 " + GATEWAY_NAME + b"\r\n\r\n"

    def _is_trusted(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:  # a Unix socket
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._trusted)


def scope_of(head: RequestHead, here: Any) -> Scope:
    """Return the parts of an ASGI scope that checks of access read."""
    lines = head.raw.split(b"\r\n")[1:-2]
    fields = [(name.lower(), value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]
    return {"type": "http", "scheme": "http", "headers": fields, "query_string": head.query, "server": here}


def _area(head: RequestHead, *, is_socket: bool) -> Area:
    """Return the area of a path. The paths of an author's own routes are for orchestrators."""
    if head.path in _DOCUMENTS:
        return Area.ANY_ROLE
    path = f"{_STATIC}{{file}}" if head.path.startswith(_STATIC) else head.path
    area = area_of(path, None if is_socket else {head.method.decode("latin-1")})
    is_open = not is_socket and (head.method in _READS or path in LOGIN_PATHS)
    return Area.CONTROL if area is Area.OPEN and not is_open else area
