"""The short way: from the protocol straight to an environment's endpoint, where nobody could tell the difference.

An application without middleware of its own would pass each request through eight layers that do nothing for it, and a
WebSocket would keep their frames for as long as it lives. Knows the stock layers of uvicorn, Starlette and FastAPI;
where it meets anything else, it does not go.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Match, WebSocketRoute
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ..access import Guard
from ..asgi import Handler, Receive, Scope, Send
from ..http_routes import GymRoutes, names_session
from ..mcp.endpoint import McpEndpoint
from ..routes import DocumentedRoute
from ..ws import WsEndpoint

# They handle errors, which the endpoints answer themselves, and rewrite addresses, at which those do not look.
_STOCK = (ServerErrorMiddleware, ExceptionMiddleware, AsyncExitStackMiddleware)
_STOCK_NAMES = frozenset({"fastapi.telemetry._asgi.ExceptionTelemetryMiddleware"})
_LOOK_S = 1.0
_SHORTCUTS: WeakKeyDictionary[Config, DirectDispatch] = WeakKeyDictionary()


class DirectDispatch:
    """The short way into one application; an ASGI application itself, which takes the long way for all else.

    Routes are looked up for each request, since applications may change theirs at any time; layers once a second.
    """

    def __init__(self, served: Any) -> None:
        self._served = served
        self._app: Any = served.app if type(served) is ProxyHeadersMiddleware else served
        self._is_clear = False
        self._looked_at = 0.0

    @classmethod
    def of(cls, config: Config) -> DirectDispatch:
        """Return the shortcut into what a server serves."""
        shortcut = _SHORTCUTS.get(config)
        if shortcut is None:
            shortcut = _SHORTCUTS[config] = cls(config.loaded_app)
        return shortcut

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer an HTTP request."""
        handler: Handler = self.handler(scope) or self._served
        return handler(scope, receive, send)

    def handler(self, scope: Scope) -> Handler | None:
        """Find the handler of a request to a session or to `/mcp`, if it is the environment's own."""
        # Without a session's name a Gym request may raise what the application has handlers for.
        if scope["type"] != "http" or not (scope["path"] == "/mcp" or names_session(scope)):
            return None
        route, found = self._match(scope)
        handler = _behind(route.app, scope) if type(route) is DocumentedRoute else None
        if type(handler) is not McpEndpoint and not isinstance(getattr(handler, "__self__", None), GymRoutes):
            return None
        scope.update(found)
        return handler

    def endpoint(self, scope: Scope) -> WsEndpoint | None:
        """Find the endpoint of a WebSocket request, if it is the environment's own."""
        route, _ = self._match(scope)
        endpoint = _behind(route.app, scope) if type(route) is WebSocketRoute else None
        return endpoint if type(endpoint) is WsEndpoint else None

    def _match(self, scope: Scope) -> tuple[Any, Scope]:
        """Return the route that the application would choose, if the request would reach it unchanged, or None."""
        now = time.monotonic()
        if not self._is_clear or now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._is_clear = _is_clear(self._app)
        if self._is_clear:
            for route in self._app.router.routes:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    return route, found
        return None, {}


def _behind(handler: Any, scope: Scope) -> Any:
    """Look behind a guard; one that refuses has to do so itself."""
    return handler.admitted(scope) if type(handler) is Guard else handler


def _is_clear(app: Any) -> bool:
    """Whether only stock layers are between an application and its routes, and nobody watches them."""
    if type(app) is not FastAPI or app.root_path:
        return False
    layer: Any = app.middleware_stack  # None until the first request has made it
    while type(layer) in _STOCK or f"{type(layer).__module__}.{type(layer).__qualname__}" in _STOCK_NAMES:
        layer = layer.app
    if layer is not app.router or type(layer) is not APIRouter or layer.middleware_stack != layer.app:
        return False
    telemetry = getattr(app, "_native_telemetry", None)  # newer versions can report each request to somebody
    return telemetry is None or not telemetry.enabled()
