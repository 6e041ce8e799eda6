"""The gate: the one place where requests are admitted or refused, in front of every route of an environment.

Asks the origin policy about web pages and the access policy about tokens. Knows ASGI and how a refusal is worded; who
may do what is in `access`, which pages are foreign in `origin`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from ..protocol.codec import encode
from ..protocol.jsonrpc import JsonRpcErrorCode, JsonRpcResponse
from .access import ROLE, AccessPolicy, Area, Role, area_of, is_of_page, shows_token
from .asgi import Handler, HeaderList, Receive, Scope, Send, header, respond_json
from .origin import OriginPolicy

FOREIGN_ORIGIN = "FOREIGN_ORIGIN"
UNAUTHORIZED = "UNAUTHORIZED"
FORBIDDEN = "FORBIDDEN"
_CHALLENGE = b"www-authenticate"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not admitted."""

    status: int
    code: str
    text: str
    role: Role | None = None
    headers: HeaderList = ()

    @property
    def details(self) -> dict[str, Any]:
        """What goes beside the text."""
        return {"code": self.code} if self.role is None else {"code": self.code, "role": self.role.value}


class Guard:
    """A route's handler, for those who may reach it."""

    # A class, since routes take functions for handlers of another kind.
    def __init__(
        self,
        handler: Handler,
        area: Area,
        origins: OriginPolicy | None,
        report: Callable[[str], None],
        *,
        by_cookie: bool = False,
    ) -> None:
        self._handler = handler
        self._by_cookie = by_cookie
        self._report = report
        self._area = area
        self._origins = origins
        self._access: AccessPolicy | None = None
        self._refuses: Callable[[Scope], bool]
        self.use(None)

    def use(self, access: AccessPolicy | None) -> None:
        """Ask for the tokens of a policy from now on; None asks for none."""
        self._access = None if access is None or access.is_open or self._area is Area.OPEN else access
        if self._access is not None:
            self._refuses = self._has_refusal
        else:  # nothing is asked that need not be
            self._refuses = self._is_foreign if self._origins is None else self._origins.refuses

    def admitted(self, scope: Scope) -> Handler | None:
        """Return the handler behind, or None for a request that is to be refused."""
        return None if self._refuses(scope) else self._handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on."""
        if not self._refuses(scope):
            await self._handler(scope, receive, send)
            return
        refusal = self._refusal(scope)
        assert refusal is not None
        self._report(refusal.code)
        if scope["type"] == "websocket":
            await _refuse_socket(scope, receive, send, refusal)
        elif self._area is Area.TOOLS and refusal.code != FOREIGN_ORIGIN:
            error = JsonRpcResponse.error_response(JsonRpcErrorCode.SERVER_ERROR, refusal.text, refusal.details)
            await respond_json(send, refusal.status, error.model_dump(), refusal.headers)
        else:
            await respond_json(send, refusal.status, {"detail": refusal.text, **refusal.details}, refusal.headers)

    def _is_foreign(self, scope: Scope) -> bool:
        return self._origins is not None and self._origins.refuses(scope)

    def _has_refusal(self, scope: Scope) -> bool:
        return self._refusal(scope) is not None

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Judge a request; one that is admitted learns its role."""
        if self._is_foreign(scope):
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
        if role not in self._area.roles:
            text = f"The role {role.value!r} of this token does not allow this."
            challenge = b'Bearer error="insufficient_scope"'
            return Refusal(403, FORBIDDEN, text, role, [(_CHALLENGE, challenge)])
        scope[ROLE] = role
        return None


class Gate:
    """Puts guards in front of routes and tells them all which tokens count; `guarded` lists those that ask for one."""

    def __init__(self, origins: OriginPolicy, access: AccessPolicy) -> None:
        self._origins = origins
        self._access = access
        self._guards: list[Guard] = []
        self.guarded: set[tuple[str, str]] = set()

    @property
    def access(self) -> AccessPolicy:
        """The tokens that count."""
        return self._access

    @access.setter
    def access(self, policy: AccessPolicy) -> None:
        self._access = policy
        for guard in self._guards:
            guard.use(policy)

    def enclose(
        self, routes: Iterable[BaseRoute], *, report: Callable[[str], None], documents: Container[str | None] = ()
    ) -> None:
        """Put a guard in front of each route.

        Args:
            routes: The routes.
            report: Told the code of each refusal.
            documents: Paths of pages about the routes, which are for any role.
        """
        for route in routes:
            assert isinstance(route, (Route, WebSocketRoute, Mount))
            methods = route.methods if isinstance(route, Route) else None
            area = area_of(route.path, methods)
            if route.path in documents:
                area = Area.ANY_ROLE
            # Pages of others may look, which their browser does not let them read; what acts is refused.
            is_get = methods is not None and {"GET", "HEAD"}.issuperset(methods)
            acts = area in (Area.TOOLS, Area.CONTROL) or route.path.startswith("/sessions") or not is_get
            origins: OriginPolicy | None = self._origins if acts else None
            if is_get and area is not Area.OPEN:
                origins = self._origins.when_looked_at(acts=acts)
            guard = Guard(route.app, area, origins, report, by_cookie=is_of_page(route.path))
            guard.use(self._access)
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
