"""Direct dispatch: calls an environment's endpoint without layers that would do nothing for the request.

Without custom middleware, each request still passes eight layers, and a WebSocket keeps their frames in memory. Direct
dispatch skips the stock layers of uvicorn, Starlette and FastAPI only. With any other layer, route class or handler,
requests go through the application as usual.

    uvicorn: ProxyHeaders -> FastAPI: ServerError -> ExceptionTelemetry -> Exception -> AsyncExitStack -> APIRouter
             -> Route -> Guard -> endpoint                       direct: route match -> Guard.admitted -> endpoint
                          ^                                              |
                          +--------- an exception of the environment ----+   for the application's handlers

Direct responses are also sent in one write. Uvicorn writes head and body separately, and each write is a system call.
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
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ..access import Guard
from ..asgi import Handler, Message, Receive, Scope, Send
from ..http_routes import GymRoutes, names_session
from ..mcp.endpoint import McpEndpoint
from ..routes import FAILURE, DocumentedRoute
from ..ws import WsEndpoint

# They handle errors, which the endpoints answer themselves, and rewrite addresses, which the endpoints ignore.
_STOCK = (ServerErrorMiddleware, ExceptionMiddleware, AsyncExitStackMiddleware)
_STOCK_NAMES = frozenset({"fastapi.telemetry._asgi.ExceptionTelemetryMiddleware"})
_PATHS = frozenset({"/step", "/reset", "/state", "/mcp"})
_CHECK_S = 1.0
_DISPATCHES: WeakKeyDictionary[Config, DirectDispatch] = WeakKeyDictionary()


class DirectDispatch:
    """Dispatches to one application: directly if that makes no difference, else through all its layers.

    Routes are matched for each request, because an application may change them at any time. Layers are checked once a
    second.
    """

    def __init__(self, served: Any) -> None:
        self._served = served
        self._app: Any = served.app if type(served) is ProxyHeadersMiddleware else served
        self._is_clear = False
        self._checked_at = 0.0

    @classmethod
    def of(cls, config: Config) -> DirectDispatch:
        """Return the dispatch of a server."""
        dispatch = _DISPATCHES.get(config)
        if dispatch is None:
            dispatch = _DISPATCHES[config] = cls(config.loaded_app)
        return dispatch

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer an HTTP request."""
        handler = self.handler(scope)
        if handler is None:
            served: Handler = self._served
            return served(scope, receive, send)
        return self._answer(handler, scope, receive, ResponseWriter.of(send))

    async def _answer(self, handler: Handler, scope: Scope, receive: Receive, send: ResponseWriter | Send) -> None:
        try:
            await handler(scope, receive, send)
        except Exception as exc:
            if names_session(scope) or (isinstance(send, ResponseWriter) and send.has_begun):
                raise
            # A call without a session raises the environment's exceptions, which the application may handle.
            await self._served({**scope, FAILURE: exc}, receive, send)

    def handler(self, scope: Scope) -> Handler | None:
        """Find the handler of a request to an environment, if it is one of ours."""
        if scope["type"] != "http" or not (scope["path"] in _PATHS or names_session(scope)):
            return None
        route, match = self._match(scope)
        handler = _behind(route.app, scope) if type(route) is DocumentedRoute else None
        if type(handler) is not McpEndpoint and not isinstance(getattr(handler, "__self__", None), GymRoutes):
            return None
        scope.update(match)
        return handler

    def endpoint(self, scope: Scope) -> WsEndpoint | None:
        """Find the endpoint of a WebSocket request, if it is one of ours."""
        route, _ = self._match(scope)
        endpoint = _behind(route.app, scope) if type(route) is WebSocketRoute else None
        return endpoint if type(endpoint) is WsEndpoint else None

    def _match(self, scope: Scope) -> tuple[Any, Scope]:
        """Return the application's route for a request, or None if a layer could change the request."""
        now = time.monotonic()
        if not self._is_clear or now - self._checked_at >= _CHECK_S:
            self._checked_at = now
            self._is_clear = _is_clear(self._app)
        if self._is_clear:
            for route in self._app.router.routes:
                match, child = route.matches(scope)
                if match is Match.FULL:
                    return route, child
        return None, {}


def _behind(handler: Any, scope: Scope) -> Any:
    """Return the handler behind a guard; None if the guard refuses the request, which it answers itself."""
    return handler.admitted(scope) if type(handler) is Guard else handler


def _is_clear(app: Any) -> bool:
    """Return whether only stock layers are between an application and its routes, and none reports requests."""
    if type(app) is not FastAPI or app.root_path:
        return False
    layer: Any = app.middleware_stack  # None until the first request has made it
    while type(layer) in _STOCK or f"{type(layer).__module__}.{type(layer).__qualname__}" in _STOCK_NAMES:
        layer = layer.app
    if layer is not app.router or type(layer) is not APIRouter or layer.middleware_stack != layer.app:
        return False
    telemetry = getattr(app, "_native_telemetry", None)  # newer versions can report each request
    return telemetry is None or not telemetry.enabled()


class ResponseWriter:
    """Sends head and body of a short response in one write.

    A response without a length is a stream: its head must not wait for its first event.
    """

    __slots__ = ("_cycle", "_head", "_send", "has_begun")

    def __init__(self, cycle: Any, send: Send) -> None:
        self._cycle = cycle
        self._send = send
        self._head: Message | None = None
        self.has_begun = False

    @classmethod
    def of(cls, send: Send) -> ResponseWriter | Send:
        """Return the writer for a response of uvicorn; `send` itself for any other."""
        cycle = getattr(send, "__self__", None)
        return cls(cycle, send) if type(cycle) is RequestResponseCycle else send

    async def __call__(self, message: Message) -> None:
        """Send a message of the application."""
        self.has_begun = True
        head, self._head = self._head, None
        if head is None:
            headers = message.get("headers", ())
            if message["type"] == "http.response.start" and any(name == b"content-length" for name, _ in headers):
                self._head = message
            else:
                await self._send(message)
            return
        cycle = self._cycle
        transport = cycle.transport
        cycle.transport = parts = _ResponseParts(transport)
        try:
            await self._send(head)
            await self._send(message)
        finally:
            cycle.transport = transport
            parts.write_out()


class _ResponseParts:
    """Stands in for a transport while uvicorn writes the parts of one response."""

    __slots__ = ("_parts", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep a part for `write_out`."""
        self._parts.append(data)

    def write_out(self) -> None:
        """Write all parts."""
        parts, self._parts = self._parts, []
        if parts:
            self._transport.writelines(parts)

    def close(self) -> None:
        """Close the transport behind the parts."""
        self.write_out()
        self._transport.close()
