"""`/docs`, `/redoc` and `/openapi.json` on a server that asks for tokens.

A browser cannot send a header with an address, so these take `?token=TOKEN` as well: the page then loads the document
with it, and the document says that the routes ask for a bearer token, which gives the page its Authorize button. Knows
FastAPI's pages; who may see them is the gate's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.routing import BaseRoute, Route

from .access import ADDRESS_TOKEN, AccessPolicy
from .asgi import Handler, Receive, Scope, Send

SCHEME = "bearer"
_PAGE = [(b"content-type", b"text/html; charset=utf-8"), (b"referrer-policy", b"no-referrer")]


class Documents:
    """The pages about an application's routes.

    Args:
        app: The application.
        access: Tells which tokens are asked for.
        guarded: The routes that ask for them, as pairs of a path and a method in lower case.
    """

    def __init__(self, app: FastAPI, access: Callable[[], AccessPolicy], guarded: Container[tuple[str, str]]) -> None:
        self._app = app
        self._access = access
        self._guarded = guarded
        self._plain = app.openapi

    @staticmethod
    def paths(app: FastAPI) -> set[str | None]:
        """Where the pages are."""
        return {app.openapi_url, app.docs_url, app.redoc_url, app.swagger_ui_oauth2_redirect_url}

    def install(self, routes: Collection[BaseRoute]) -> None:
        """Take over the pages among routes that have no guard yet, and the document."""
        self._app.openapi = self.openapi  # type: ignore[method-assign]
        for route in routes:
            if isinstance(route, Route) and route.path in (self._app.docs_url, self._app.redoc_url):
                route.app = _Page(self, route.path, route.app)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document; where tokens are asked for, it says so."""
        document = self._plain()
        if self._access().is_open:
            return document
        paths = {
            path: {
                method: {**operation, "security": [{SCHEME: []}]} if (path, method) in self._guarded else operation
                for method, operation in operations.items()
            }
            for path, operations in document.get("paths", {}).items()
        }
        components = document.get("components", {})
        schemes = {**components.get("securitySchemes", {}), SCHEME: {"type": "http", "scheme": "bearer"}}
        return {**document, "paths": paths, "components": {**components, "securitySchemes": schemes}}

    def page(self, path: str, token: str, root: str) -> bytes:
        """Return a page that loads the document with a token."""
        app = self._app
        address = f"{root}{app.openapi_url}?token={quote(token, safe='')}"
        if path == app.redoc_url:
            return bytes(get_redoc_html(openapi_url=address, title=f"{app.title} - ReDoc").body)
        page = get_swagger_ui_html(
            openapi_url=address,
            title=f"{app.title} - Swagger UI",
            init_oauth=app.swagger_ui_init_oauth,
            swagger_ui_parameters=app.swagger_ui_parameters,
        )
        return bytes(page.body)


class _Page:
    """A page's handler: FastAPI's own, unless the token came in the address."""

    def __init__(self, documents: Documents, path: str, handler: Handler) -> None:
        self._documents = documents
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = scope.get(ADDRESS_TOKEN)
        if token is None:
            await self._handler(scope, receive, send)
            return
        page = self._documents.page(self._path, token, str(scope.get("root_path", "")).rstrip("/"))
        await send({"type": "http.response.start", "status": 200, "headers": _PAGE})
        await send({"type": "http.response.body", "body": page})
