"""Puts the page onto an application: its routes, behind the gate like all others, and its place in the lifespan.

Knows which parts there are and how they are put together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

from fastapi import Body, FastAPI
from starlette.routing import BaseRoute, Route, WebSocketRoute

from .. import settings
from ..server.app import HTTPEnvServer, PageWish, create_app
from ..server.asgi import Handler
from ..server.routes import DocumentedRoute
from ..types import EnvironmentMetadata, ServerMode
from .files import PageFiles
from .page import CustomTab, PageDescription, PageOptions
from .page_routes import Login, OperatorRoutes, PlayRoutes, UiEndpoint
from .play import Play
from .visitors import Visitors

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")

_GYM = frozenset({"/web/reset", "/web/step", "/web/state"})


class WebPage:
    """The page of one served environment.

    Args:
        server: The environment's server, whose mode is set already.
        options: What the application says about the page.
    """

    def __init__(self, server: HTTPEnvServer, options: PageOptions) -> None:
        service = server.service
        self.service = service
        self.options = options
        self.visitors = Visitors(service.manager)
        self.play = Play(service)
        self.description = PageDescription(service, self.play, options)
        self._server = server
        self._routes = PlayRoutes(service, self.visitors, self.play, self.description, lambda: server.access)
        self._operators = OperatorRoutes(service.manager, self.visitors)
        self._login = Login(lambda: server.access, service.manager.report_error)
        framed_by = {origin for origin in settings.allowed_origins() if origin != "*"}
        if settings.space_host():
            framed_by |= {"https://huggingface.co", "https://*.hf.space"}
        self._files = PageFiles(self.visitors.of, framed_by, is_embedded=settings.space_host() is not None)

    def routes(self) -> list[BaseRoute]:
        """Return the page's routes; in production mode nobody resets, steps or looks at states."""
        plays = self.service.mode is ServerMode.SIMULATION
        documented = [route for route in self._documented() if plays or route.path not in _GYM]
        hidden: list[tuple[str, str, Handler]] = [
            ("GET", "/", self._files.redirect),
            ("GET", "/web", self._files.redirect),
            ("GET", "/web/", self._files.index),
            ("GET", "/web/static/{file}", self._files.static),
            ("POST", "/web/login", self._login.login),
            ("POST", "/web/logout", self._login.logout),
            ("GET", "/web/page", self._routes.page),
            ("POST", "/web/close", self._routes.close),
            ("POST", "/web/call", self._routes.call),
            ("GET", "/web/sessions", self._operators.list),
            ("DELETE", "/web/sessions/{session_id}", self._operators.end),
        ]
        return [
            *documented,
            *(_hidden(method, path, handler) for method, path, handler in hidden),
            WebSocketRoute("/ws/ui", UiEndpoint(self.visitors), name="ws_ui"),
        ]

    def _documented(self) -> list[DocumentedRoute]:
        control: dict[str, Any] = {"tags": ["Environment Control"]}
        return [
            DocumentedRoute(
                "/web/metadata",
                _web_metadata_signature,
                self._routes.metadata,
                methods=["GET"],
                response_model=EnvironmentMetadata,
                tags=["Environment Info"],
                summary="Describe the environment for the page",
            ),
            DocumentedRoute(
                "/web/reset",
                _web_reset_signature,
                self._routes.reset,
                methods=["POST"],
                summary="Begin an episode in the visitor's session",
                **control,
            ),
            DocumentedRoute(
                "/web/step",
                _web_step_signature,
                self._routes.step,
                methods=["POST"],
                summary="Take an action in the visitor's session",
                **control,
            ),
            DocumentedRoute(
                "/web/state",
                _web_state_signature,
                self._routes.state,
                methods=["GET"],
                tags=["State Management"],
                summary="Show the state of the visitor's episode",
            ),
        ]


def attach_web(app: FastAPI, options: PageOptions | None = None) -> WebPage | None:
    """Put the page onto the application of an environment.

    Args:
        app: What `create_app` or `create_fastapi_app` has made.
        options: What to say about the page.

    Returns:
        The page; None for an application that has one already, or is no environment's.
    """
    server = getattr(app.state, "openenv_server", None)
    taken = {getattr(route, "path", None) for route in app.router.routes}
    if not isinstance(server, HTTPEnvServer) or "/ws" not in taken or taken & {"/web", "/web/"}:
        return None
    page = WebPage(server, options or PageOptions())
    added = [route for route in page.routes() if getattr(route, "path", None) not in taken]
    server.guard(added)
    app.router.routes += added
    app.state.openenv_web = page
    app.openapi_schema = None
    _leave_with(app, page.visitors.leave)
    return page


def add_page(app: FastAPI, wish: PageWish | None = None, *, folder: Path | None = None) -> WebPage | None:
    """Put the page onto an application, with a Gradio page of the environment's own if there is a builder of one.

    Without Gradio the standard page is there alone, and the log says so: trainers are not concerned.

    Args:
        app: What `create_app` or `create_fastapi_app` has made.
        wish: What the application asks for; by default the standard page.
        folder: The environment's folder, where a README may be.

    Returns:
        The page; None for an application that has one already, or is no environment's.

    Raises:
        TypeError: The builder returned no Gradio page.
    """
    wish = wish or PageWish()
    wish = wish or PageWish()
    mount = None if wish.gradio_builder is None else _gradio_mount()
    custom = None
    if mount is not None:
        custom = CustomTab(wish.tab_name, is_primary=wish.tab_is_primary, is_alone=not wish.shows_default)
    page = attach_web(app, PageOptions(title=wish.title, custom=custom, folder=folder))
    if page is not None and mount is not None:
        mount(app, page, wish.gradio_builder)
    return page


def _gradio_mount() -> Callable[..., Any] | None:
    try:
        from .gradio_page import mount_gradio  # loads Gradio
    except ImportError as exc:
        logger.warning("the standard page is shown alone: %s", exc)
        return None
    return mount_gradio


def _with_page(make: Callable[_P, FastAPI]) -> Callable[_P, FastAPI]:
    @functools.wraps(make, assigned=())  # for its signature
    def create_web_interface_app(*args: _P.args, **kwargs: _P.kwargs) -> FastAPI:
        """Build the application of an environment with its web page; arguments as for `create_app`."""
        app = make(*args, **kwargs)
        if not hasattr(app.state, "openenv_web"):
            add_page(app, app.state.openenv_page_wish)
        return app

    return create_web_interface_app


create_web_interface_app = _with_page(create_app)


def _leave_with(app: FastAPI, leave: Callable[[], None]) -> None:
    """Say goodbye to visitors before their sessions are closed."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        async with inner(application) as state:
            try:
                yield state
            finally:
                leave()

    app.router.lifespan_context = lifespan


class _Hidden(Route):
    """A route that the OpenAPI document does not mention."""

    def __init__(self, path: str, handler: Handler, method: str) -> None:
        super().__init__(path, _nothing, methods=[method], include_in_schema=False, name=f"{method} {path}")
        self.app = handler


def _hidden(method: str, path: str, handler: Handler) -> Route:
    return _Hidden(path, handler, method)


async def _nothing(request: Any) -> None:
    """Stands where Starlette wants a function; the handler is called in its place."""


async def _web_metadata_signature() -> None:
    """Documents `GET /web/metadata`."""


async def _web_reset_signature(request: dict[str, Any] | None = Body(default=None)) -> dict[str, Any]:  # noqa: B008  # FastAPI reads it
    """Documents `POST /web/reset`."""
    return request or {}


async def _web_step_signature(request: dict[str, Any]) -> dict[str, Any]:
    """Documents `POST /web/step`."""
    return request


async def _web_state_signature() -> dict[str, Any]:
    """Documents `GET /web/state`."""
    return {}
