"""The application of `openenv view`: stores of rollouts, with the page's files, login and guard, and no environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette

from openenv import settings
from openenv._lazy import load_package_version
from openenv.server.access import AccessGate, AccessPolicy, OriginPolicy, role_of
from openenv.server.asgi import Handler, Receive, Scope, Send, respond_json
from openenv.server.web.page_routes import PageLogin
from openenv.server.web.web_page import HiddenRoute, PageFiles

from .rollout_routes import RolloutRoutes, RolloutViewer, StoreSet


def viewer_app(folders: Mapping[str, Path], access: AccessPolicy | None = None) -> Starlette:
    """Build an application that shows stores.

    Args:
        folders: The stores by the names under which they are shown.
        access: Which tokens it asks for; by default none.
    """
    policy = access or AccessPolicy()
    routes = RolloutRoutes(RolloutViewer(StoreSet(folders)))
    files = PageFiles(None, index="viewer.html")
    login = PageLogin(lambda: policy, lambda code: None)

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        about = {
            "role": role_of(scope).value,
            "openenv_version": load_package_version(),
            "asks_for_token": not policy.is_open,
        }
        await respond_json(send, 200, about, [(b"cache-control", b"no-store")])

    handlers: list[tuple[str, str, Handler]] = [
        ("GET", "/", files.redirect),
        ("GET", "/web", files.redirect),
        ("GET", "/web/", files.index),
        ("GET", "/web/static/{file}", files.static),
        ("POST", "/web/login", login.login),
        ("POST", "/web/logout", login.logout),
        ("GET", "/web/page", page),
        *(("GET", path, handler) for path, handler in routes.handlers()),
    ]
    own = [HiddenRoute(method, path, handler) for method, path, handler in handlers]
    gate = AccessGate(OriginPolicy(settings.allowed_origins()), policy)
    gate.enclose(own, report=lambda code: None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            routes.close()

    return Starlette(routes=own, lifespan=lifespan)
