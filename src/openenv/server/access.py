"""Access control: which requests a server admits, by token (roles) and by the web page they come from (origins).

An orchestrator may do everything. An agent may call tools and nothing else: it cannot reset, read the state, or see
rewards. An observer may look and change nothing. Without tokens every client is an orchestrator.

    request --> Guard (in front of every route) -- a head over the limit -------------> 431 HEAD_TOO_LARGE
                                                -- OriginPolicy: foreign page? ------> 403 FOREIGN_ORIGIN
                                                -- AccessPolicy: no or unknown token -> 401 UNAUTHORIZED
                                                -- Area of the route: wrong role ----> 403 FORBIDDEN
                                                --> handler, with the role in the scope (`role_of`)
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from openenv import settings
from openenv.protocol.json_values import encode
from openenv.protocol.jsonrpc import JsonRpcErrorCode, JsonRpcResponse

from .asgi import (
    HEAD_TOO_LARGE,
    MOST_FIELDS,
    MOST_HEAD_BYTES,
    Handler,
    HeaderList,
    Receive,
    Scope,
    Send,
    cookie,
    head_bytes,
    header,
    respond_json,
    transport_of,
)
from .runners import loop_local
from .slow_clients import UnreadReplies

ROLE: Final = "openenv.role"
ADDRESS_TOKEN: Final = "openenv.address_token"
_TOKEN_COOKIE: Final = "openenv_token"
VISITOR_COOKIE: Final = "openenv_visitor"
"""Identifies a browser on the web page; routing reads it, too."""
GATEWAY_NAME: Final = b"openenv-gateway"
"""The name of `openenv gateway` in `Via`."""
_IDENTIFIED: Final = "openenv.access"
_TOKEN = re.compile(r"[!-+\--~]+")  # visible ASCII without the comma, which separates tokens


class Role(str, Enum):
    """The rights of a token."""

    ORCHESTRATOR = "orchestrator"
    AGENT = "agent"
    OBSERVER = "observer"


class Area(Enum):
    """A part of a server that the same roles may enter."""

    OPEN = "open"
    ANY_ROLE = "any role"
    LOOK = "look"
    RECORDINGS = "recordings"
    TOOLS = "tools"
    CONTROL = "control"

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that may enter."""
        return _ENTRY[self]


_ENTRY: Mapping[Area, frozenset[Role]] = {
    Area.OPEN: frozenset(Role),
    Area.ANY_ROLE: frozenset(Role),
    Area.LOOK: frozenset({Role.ORCHESTRATOR, Role.OBSERVER}),
    Area.RECORDINGS: frozenset({Role.ORCHESTRATOR}),  # and observers, if the policy says so
    Area.TOOLS: frozenset({Role.ORCHESTRATOR, Role.AGENT}),
    Area.CONTROL: frozenset({Role.ORCHESTRATOR}),
}
_PROBED = frozenset({"/health", "/ready"})  # for load balancers, which have no tokens
_LOOKED_AT = frozenset({"/metadata", "/schema", "/metrics", "/state", "/sessions", "/sessions/{session_id}"})
# The page itself holds no secrets, and a visitor without a token must find the form that takes one.
_PAGE = frozenset({"/", "/web", "/web/", "/web/static/{file}", "/web/login", "/web/logout"})
_LOOKED_AT_ON_PAGE = frozenset({"/web/page", "/web/metadata", "/web/state", "/web/sessions"})
_STORED = "/web/rollouts"
_RECORDED = "/web/episodes"  # has all actions and observations, which may contain solutions
_REQUESTS: Mapping[Role, frozenset[str]] = {
    Role.AGENT: frozenset({"open", "mcp", "close", "batch", "cancel", "ping"}),
    Role.OBSERVER: frozenset({"state", "ping"}),
}


def area_of(path: str, methods: Iterable[str] | None) -> Area:
    """Return the area of a route. Unlisted routes are for orchestrators only.

    Args:
        path: The route's path, with its parameters.
        methods: Its HTTP methods; None for a WebSocket.
    """
    if path == "/mcp" or (path == "/ws" and methods is None):  # frames on a socket are checked one by one: see `may`
        return Area.TOOLS
    if path in _PAGE:
        return Area.OPEN
    if path == "/ws/ui" and methods is None:
        return Area.LOOK
    if methods is None or not {"GET", "HEAD"}.issuperset(methods):
        return Area.CONTROL
    if path in _PROBED:
        return Area.OPEN
    if path.startswith(_RECORDED):
        return Area.RECORDINGS
    is_seen = path in _LOOKED_AT or path in _LOOKED_AT_ON_PAGE or path.startswith(_STORED)
    return Area.LOOK if is_seen else Area.CONTROL


def is_of_page(path: str) -> bool:
    """Return whether a route belongs to the web page. The page's cookie is valid on these routes only."""
    return path in ("/", "/web", "/ws/ui") or path.startswith("/web/")


def token_cookie(scope: Scope) -> str:
    """Name the cookie that holds the page's token; browsers have one set of cookies for all ports of a host."""
    _, _, port = (header(scope, b"host") or "").rpartition(":")
    return f"{_TOKEN_COOKIE}_{port}" if port.isdecimal() and port.isascii() else _TOKEN_COOKIE


def page_key(token: str) -> str:
    """Return the cookie value for a token. Servers on other ports see the cookie and must not learn the token."""
    return hmac.new(token.encode(), b"openenv web page", "sha256").hexdigest()


def may(role: Role, request: str) -> bool:
    """Return whether a role may send a request of this type over `/ws`: `reset`, `step`, `mcp`, `open` and so on.

    Each request of a `batch` is checked separately.
    """
    return role is Role.ORCHESTRATOR or request in _REQUESTS[role]


def role_of(scope: Scope) -> Role:
    """Return the role of an admitted connection or request; without tokens every client is an orchestrator."""
    role = scope.get(ROLE, Role.ORCHESTRATOR)
    assert isinstance(role, Role)
    return role


def shows_token(scope: Scope) -> bool:
    """Return whether a request carried a token, valid or not; call `identify` first."""
    return bool(scope.get(_IDENTIFIED, (None, None, False))[2])


class AccessPolicy:
    """The tokens of a server and their roles. A server without tokens is open.

    Args:
        orchestrator: Tokens that may do everything; one or several.
        agent: Tokens that may call tools.
        observer: Tokens that may read.
        observers_see_episodes: Whether observers may read recorded episodes, with all actions and observations.

    Raises:
        ValueError: A token is empty, cannot be sent in a header, or has two roles.
    """

    def __init__(
        self,
        *,
        orchestrator: str | Iterable[str] = (),
        agent: str | Iterable[str] = (),
        observer: str | Iterable[str] = (),
        observers_see_episodes: bool = False,
    ) -> None:
        self._observers_see_episodes = observers_see_episodes
        by_role = {Role.ORCHESTRATOR: orchestrator, Role.AGENT: agent, Role.OBSERVER: observer}
        self._tokens: dict[bytes, Role] = {}
        self._page_keys: dict[bytes, Role] = {}
        for role, tokens in by_role.items():
            for token in [tokens] if isinstance(tokens, str) else tokens:
                self._add(token, role)

    def _add(self, token: str, role: Role) -> None:
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"the {role.value} token is empty, or has characters that a header cannot carry")
        known = self._tokens.setdefault(token.encode(), role)
        self._page_keys[page_key(token).encode()] = known
        if known is not role:
            raise ValueError(f"one token cannot be both the {known.value}'s and the {role.value}'s")

    @classmethod
    def from_settings(cls) -> AccessPolicy:
        """Return the policy from `OPENENV_TOKEN` and related variables."""
        return cls(
            orchestrator=settings.orchestrator_tokens(),
            agent=settings.agent_tokens(),
            observer=settings.observer_tokens(),
            observers_see_episodes=settings.observers_see_episodes(),
        )

    def __repr__(self) -> str:
        roles = ", ".join(role.value for role in Role if self.has(role))
        return f"<AccessPolicy {f'with tokens for {roles}' if roles else 'open'}>"

    @property
    def is_open(self) -> bool:
        """Whether the server has no tokens, so every client may do everything."""
        return not self._tokens

    def has(self, role: Role) -> bool:
        """Return whether some token has a role."""
        return role in self._tokens.values()

    def admits(self, role: Role, area: Area) -> bool:
        """Return whether a role may enter an area."""
        if area is Area.RECORDINGS and role is Role.OBSERVER:
            return self._observers_see_episodes
        return role in area.roles

    def role(self, token: str) -> Role | None:
        """Return the role of a token, or None for an unknown one, in constant time."""
        return _match(self._tokens, token)

    def identify(self, scope: Scope, *, by_address: bool = False, by_cookie: bool = False) -> Role | None:
        """Return the role of a request's token; None without a valid token.

        Args:
            scope: The request.
            by_address: Whether to accept `?token=` in the address, for clients that cannot set headers. The token is
                removed from the query, so that it is not logged; a valid one is stored in the scope as `ADDRESS_TOKEN`.
            by_cookie: Whether to accept the web page's cookie.
        """
        known = scope.get(_IDENTIFIED)
        if known is not None and known[0] is self:  # direct dispatch may have done this already
            role: Role | None = known[1]
            return role
        token = _bearer(scope)
        if by_address:
            written = _take_from_address(scope)
            token = written if token is None else token
        kept = cookie(scope, token_cookie(scope)) if by_cookie and token is None else None
        role = None if token is None else self.role(token)
        if kept is not None:
            role = _match(self._page_keys, kept)
        scope[_IDENTIFIED] = (self, role, token is not None or kept is not None)
        if role is not None and by_address and written is not None:
            scope[ADDRESS_TOKEN] = written
        return role


def _match(known: Mapping[bytes, Role], text: str) -> Role | None:
    secret, match = text.encode("utf-8", "surrogatepass"), None
    for token, role in known.items():  # all of them, so that the time reveals nothing
        if hmac.compare_digest(token, secret):
            match = role
    return match


def _bearer(scope: Scope) -> str | None:
    scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _take_from_address(scope: Scope) -> str | None:
    query: bytes = scope.get("query_string") or b""
    if b"token=" not in query:
        return None
    parts = query.split(b"&")
    scope["query_string"] = b"&".join(part for part in parts if not part.startswith(b"token="))
    token = next((part for part in parts if part.startswith(b"token=")), None)
    return None if token is None else unquote(token[len(b"token=") :].decode("latin-1"))


_DEFAULT_PORTS = {"http": 80, "https": 443}


class OriginPolicy:
    """Distinguishes the pages of this server from foreign pages.

    Browsers let any page send requests to a server on loopback or in a private network, and name the page's origin in
    `Origin`. Programs send no such header, so this policy does not affect them.

    Args:
        allowed: Origins that may use the server as well, such as `https://lab.example`; `*` allows all.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    def refuses(self, scope: Scope) -> bool:
        """Return whether a request comes from a page that may not make it."""
        origin = header(scope, b"origin")
        if origin is None or "*" in self._allowed or origin.lower() in self._allowed:
            return False
        host = header(scope, b"host") or ""
        return not _is_same(origin, host) or _is_rebound(scope, host)

    def refuses_reader(self, scope: Scope) -> bool:
        """Return whether a GET comes from a page that reached loopback under a foreign name (DNS rebinding).

        Browsers omit `Origin` in a GET to the server that they believe the page comes from. They always send
        `Accept-Language`, which programs do not. `Sec-Fetch-Site` means safety: browsers send it only over TLS and to
        the names of loopback, which a foreign name cannot imitate.
        """
        if header(scope, b"accept-language") is None or header(scope, b"sec-fetch-site") is not None:
            return False
        host = header(scope, b"host") or ""
        if "*" in self._allowed or any(_is_same(origin, host) for origin in self._allowed):
            return False
        return _is_rebound(scope, host)


def _is_rebound(scope: Scope, host: str) -> bool:
    """Return whether a page reached loopback under a name that its owner has pointed here (DNS rebinding)."""
    address = (scope.get("server") or ("",))[0]
    if not _is_loopback(address) or _is_relayed(scope):
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return True
    return not _is_loopback(name) and _address(name) is None  # a numeric address cannot be rebound


def _is_relayed(scope: Scope) -> bool:
    """Return whether `openenv gateway` has relayed a request, and so has compared the name with its own address.

    Pages cannot set this header: Fetch forbids `Via` (section 2.2.2), and WebSockets of pages have no headers.
    """
    values = (value for name, value in scope["headers"] if name == b"via")
    return any(proxy.split()[1:2] == [GATEWAY_NAME] for value in values for proxy in value.split(b","))


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def _is_same(origin: str, host: str) -> bool:
    """Compare host and port. A missing port is the default port for the scheme of the page.

    The request's scheme does not count: behind a proxy that ends TLS the browser sees another one.
    """
    try:
        page, own = urlsplit(origin), urlsplit(f"//{host}")
        default = _DEFAULT_PORTS[page.scheme]
        return bool(own.hostname) and (page.hostname, page.port or default) == (own.hostname, own.port or default)
    except (KeyError, ValueError):  # "null", the schemes of extensions and files, and nonsense
        return False


FOREIGN_ORIGIN = "FOREIGN_ORIGIN"
UNAUTHORIZED = "UNAUTHORIZED"
FORBIDDEN = "FORBIDDEN"
_CHALLENGE = b"www-authenticate"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for refusing a request."""

    status: int
    code: str
    text: str
    role: Role | None = None
    headers: HeaderList = ()

    @property
    def details(self) -> dict[str, Any]:
        """The error details beside the text."""
        return {"code": self.code} if self.role is None else {"code": self.code, "role": self.role.value}


class Guard:
    """A route's handler behind the checks of its area.

    Args:
        handler: The handler.
        area: The area, which lists the roles that may enter.
        origin_checks: Return whether a request comes from a page that may not make it.
        report: Called with the code of each refusal.
        gate: The gate of all routes.
        by_cookie: Whether the web page's cookie is valid here.
    """

    # A class, since routes take functions for handlers of another kind.
    def __init__(
        self,
        handler: Handler,
        area: Area,
        origin_checks: Sequence[Callable[[Scope], bool]],
        report: Callable[[str], None],
        *,
        gate: AccessGate,
        by_cookie: bool = False,
    ) -> None:
        self._gate = gate
        self._handler = handler
        self._by_cookie = by_cookie
        self._report = report
        self._area = area
        self._origin_checks = origin_checks
        self._access: AccessPolicy | None = None

    def use(self, access: AccessPolicy) -> None:
        """Require the tokens of a policy from now on."""
        self._access = None if access.is_open or self._area is Area.OPEN else access

    def admitted(self, scope: Scope) -> Handler | None:
        """Return the handler, or None for a request that must be refused."""
        return self._handler if self._refusal(scope) is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if self._gate.on_slow_request is not None:
            self._gate.on_slow_request(receive)
        refusal = _head_refusal(scope) or self._refusal(scope)
        transport = transport_of(receive) if scope["type"] == "http" else None
        if refusal is None and transport is not None:
            unread = loop_local(asyncio.get_running_loop(), UnreadReplies)
            reader = unread.begin_request(transport, lambda *_: transport.abort())
            try:
                await self._handler(scope, receive, send)
            finally:
                unread.end_request(transport, reader)
            return
        if refusal is None:
            await self._handler(scope, receive, send)
            return
        self._report(refusal.code)
        if scope["type"] == "websocket":
            await _refuse_socket(scope, receive, send, refusal)
        elif self._area is Area.TOOLS and refusal.code != FOREIGN_ORIGIN:
            error = JsonRpcResponse.error_response(JsonRpcErrorCode.SERVER_ERROR, refusal.text, refusal.details)
            await respond_json(send, refusal.status, error.model_dump(), refusal.headers)
        else:
            await respond_json(send, refusal.status, {"detail": refusal.text, **refusal.details}, refusal.headers)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Check a request; store the role of an admitted one in its scope."""
        if any(is_foreign(scope) for is_foreign in self._origin_checks):
            page = header(scope, b"origin") or f"http://{header(scope, b'host')}"
            text = f"Pages of {page} may not use this server; see OPENENV_ALLOWED_ORIGINS."
            return Refusal(403, FOREIGN_ORIGIN, text)
        if self._access is None:
            return None
        by_address = self._area in (Area.TOOLS, Area.ANY_ROLE)
        role = self._access.identify(scope, by_address=by_address, by_cookie=self._by_cookie)
        if role is None:
            text, challenge = "This server asks for a token: send 'Authorization: Bearer TOKEN'.", b"Bearer"
            if shows_token(scope):
                text, challenge = "This server does not know this token.", b'Bearer error="invalid_token"'
            if self._area is Area.ANY_ROLE:
                text += " In a browser, add ?token=TOKEN to the address."
            return Refusal(401, UNAUTHORIZED, text, headers=[(_CHALLENGE, challenge)])
        if not self._access.admits(role, self._area):
            text = f"The role {role.value!r} of this token does not allow this."
            challenge = b'Bearer error="insufficient_scope"'
            return Refusal(403, FORBIDDEN, text, role, [(_CHALLENGE, challenge)])
        scope[ROLE] = role
        return None


def _head_refusal(scope: Scope) -> Refusal | None:
    """Refuse a head over the limit. Our protocols do this earlier; uvicorn's accept any size."""
    headers, target = scope["headers"], (scope.get("raw_path") or b"") + scope.get("query_string", b"")
    if len(headers) <= MOST_FIELDS and head_bytes(target, headers) <= MOST_HEAD_BYTES:
        return None
    return Refusal(431, HEAD_TOO_LARGE, f"A head has at most {MOST_HEAD_BYTES} bytes, in at most {MOST_FIELDS} fields.")


class AccessGate:
    """Puts a guard in front of each route, all with the same tokens; `guarded` lists the routes that need a token."""

    def __init__(self, origins: OriginPolicy, access: AccessPolicy) -> None:
        self._origins = origins
        self.access = access
        self._guards: list[Guard] = []
        self.guarded: set[tuple[str, str]] = set()
        self.on_slow_request: Callable[[Receive], None] | None = None
        """Called with each request that passed all layers of the application, which direct dispatch avoids."""

    def use(self, access: AccessPolicy) -> None:
        """Require the tokens of a policy from now on."""
        self.access = access
        for guard in self._guards:
            guard.use(access)

    def enclose(
        self, routes: Iterable[BaseRoute], *, report: Callable[[str], None], documents: Container[str | None] = ()
    ) -> None:
        """Put a guard in front of each route.

        Args:
            routes: The routes.
            report: Called with the code of each refusal.
            documents: Paths of the API documents, which any role may read.
        """
        for route in routes:
            assert isinstance(route, (Route, WebSocketRoute, Mount))
            methods = route.methods if isinstance(route, Route) else None
            area = area_of(route.path, methods)
            if route.path in documents:
                area = Area.ANY_ROLE
            # A foreign page may send GET requests, because its browser hides the answers. Refuse requests with effects.
            is_get = methods is not None and {"GET", "HEAD"}.issuperset(methods)
            acts = area in (Area.TOOLS, Area.CONTROL) or route.path.startswith("/sessions") or not is_get
            checks = [self._origins.refuses] if acts else []
            if is_get and area is not Area.OPEN:
                checks.append(self._origins.refuses_reader)
            guard = Guard(route.app, area, checks, report, gate=self, by_cookie=is_of_page(route.path))
            guard.use(self.access)
            route.app = guard
            self._guards.append(guard)
            if area is not Area.OPEN and isinstance(route, Route):
                self.guarded |= {(route.path, method.lower()) for method in route.methods or ()}


async def _refuse_socket(scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
    await receive()  # websocket.connect
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.code})
        return
    body = encode({"detail": refusal.text, **refusal.details})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *refusal.headers]
    await send({"type": "websocket.http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
