"""The web page of an application: its routes, its files, and its place in the application's lifespan."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol

from fastapi import Body, FastAPI
from starlette.routing import BaseRoute, Route, WebSocketRoute

from openenv import settings
from openenv._lazy import load_plugin
from openenv.types import EnvironmentMetadata, ServerMode

from ..app import HTTPEnvServer, PageArguments, create_app
from ..asgi import Handler, HeaderList, Receive, Scope, Send, cookie, header, respond_json
from ..routes import DocumentedRoute
from .episode_recorder import EpisodeRecorder
from .episode_routes import EpisodeRoutes
from .page_description import PageDescription
from .page_routes import SESSIONS, PageLogin, PageRoutes, UiEndpoint, visitor_cookie
from .visitor_actions import VisitorActions
from .visitors import COOKIE, Visitors

FOLDER: Final = Path(__file__).parent / "static"


class PageRoutePlugin(Protocol):
    """Further routes of the page, from the entry-point group `openenv.page_routes`."""

    def handlers(self) -> Iterable[tuple[str, Handler]]:
        """Return the paths and their handlers, all for GET."""

    def close(self) -> None:
        """Release the resources of the routes."""


_INDEX = "index.html"
# Inline styles are allowed for the drawings of environments: a frame made from text inherits this policy. Scripts must
# come from this server, and that frame allows no scripts.
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; frame-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'self'; object-src 'none'; frame-ancestors {}"
)
_REDIRECT = [(b"location", b"web/"), (b"content-length", b"0")]
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")

_PLAY_ROUTES = frozenset({"/web/reset", "/web/step", "/web/state"})


class WebPage:
    """The page of one served environment; the server's mode has been set."""

    def __init__(self, server: HTTPEnvServer, arguments: PageArguments, folder: Path | None) -> None:
        service = server.service
        self.service = service
        self.arguments = arguments
        self.recorder = EpisodeRecorder(service)
        self.visitors = Visitors(service.manager, on_session=self.recorder.record_visitor)
        self.actions = VisitorActions(service)
        description = PageDescription(service, self.actions, arguments, folder)
        is_embedded = settings.space_host() is not None
        self._routes = PageRoutes(
            service, self.visitors, self.actions, description, lambda: server.access, is_embedded=is_embedded
        )
        service.manager.answers[SESSIONS] = self._routes.encoded_sessions
        self._login = PageLogin(lambda: server.access, service.manager.report_error)
        self._rollouts = _rollout_routes(arguments)
        self._episodes = EpisodeRoutes(service, self.recorder, self.visitors)
        framed_by = {origin for origin in settings.allowed_origins() if origin != "*"}
        if settings.space_host():
            framed_by |= {"https://huggingface.co", "https://*.hf.space"}
        self._files = PageFiles(self.visitors, framed_by, is_embedded=is_embedded)

    def routes(self) -> list[BaseRoute]:
        """Return the page's routes; production mode has no reset, step or state."""
        plays = self.service.mode is ServerMode.SIMULATION
        routes = self._routes
        hidden: list[tuple[str, str, Handler]] = [
            ("GET", "/", self._files.redirect_root),
            ("GET", "/web", self._files.redirect),
            ("GET", "/web/", self._files.index),
            ("GET", "/web/static/{file}", self._files.static),
            ("POST", "/web/login", self._login.login),
            ("POST", "/web/logout", self._login.logout),
            ("GET", "/web/page", routes.page),
            ("POST", "/web/close", routes.close),
            ("POST", "/web/cancel", routes.cancel),
            ("POST", "/web/call", routes.call),
            ("GET", "/web/sessions", routes.sessions),
            ("DELETE", "/web/sessions/{session_id}", routes.end_session),
        ]
        if self._rollouts is not None:
            hidden += (("GET", path, handler) for path, handler in self._rollouts.handlers())
        hidden += (("GET", path, handler) for path, handler in self._episodes.handlers())
        return [
            *(route for route in self._documented() if plays or route.path not in _PLAY_ROUTES),
            *(HiddenRoute(method, path, handler) for method, path, handler in hidden),
            WebSocketRoute("/ws/ui", UiEndpoint(self.visitors), name="ws_ui"),
        ]

    def shut_down(self) -> None:
        """End the visitors' connections, and release the rollouts."""
        self.visitors.shut_down()
        if self._rollouts is not None:
            self._rollouts.close()

    def start(self) -> None:
        """Start recording episodes: the server runs."""
        self.recorder.start()

    async def stopped(self) -> None:
        """Write the ends of the last episodes: all sessions are closed."""
        await asyncio.get_running_loop().run_in_executor(None, self.recorder.stop)

    def _documented(self) -> list[DocumentedRoute]:
        page = self._routes
        info, play, state = "Environment Info", "Environment Control", "State Management"
        rows = (
            (
                "GET /web/metadata",
                page.metadata,
                _web_metadata_signature,
                info,
                "Describe the environment for the page",
            ),
            ("POST /web/reset", page.reset, _web_reset_signature, play, "Begin an episode in the visitor's session"),
            ("POST /web/step", page.step, _web_step_signature, play, "Take an action in the visitor's session"),
            ("GET /web/state", page.state, _web_state_signature, state, "Show the state of the visitor's episode"),
        )
        return [
            DocumentedRoute(
                request.split()[1], signature, handler, methods=request.split()[:1], tags=[tag], summary=summary
            )
            for request, handler, signature, tag, summary in rows
        ]


def attach_web(app: FastAPI, arguments: PageArguments | None = None, *, folder: Path | None = None) -> WebPage | None:
    """Add the page to an environment's application, with a tab for its custom page if it has a builder.

    Args:
        app: The result of `create_app` or `create_fastapi_app`.
        arguments: The page's arguments of `create_app`; by default the standard page.
        folder: The environment's folder, to look for a README.

    Returns:
        The page; None for an application that already has one, or has no environment.
    """
    server = getattr(app.state, "openenv_server", None)
    taken = {getattr(route, "path", None) for route in app.router.routes}
    if not isinstance(server, HTTPEnvServer) or "/ws" not in taken or taken & {"/web", "/web/"}:
        return None
    page = WebPage(server, arguments or PageArguments(), folder)
    added = [route for route in page.routes() if getattr(route, "path", None) not in taken]
    server.guard(added)
    app.router.routes += added
    app.state.openenv_web = page
    app.openapi_schema = None
    wrap_lifespan(
        app, on_start=page.start, on_stop=page.shut_down, on_stopped=page.stopped
    )  # on_stop: before the manager closes sessions
    return page


def add_page(app: FastAPI, arguments: PageArguments | None = None, *, folder: Path | None = None) -> WebPage | None:
    """Add the page like `attach_web`, and the environment's custom Gradio page if it has a builder.

    Without Gradio, add only the standard page and log a warning: trainers do not need Gradio.

    Raises:
        TypeError: The builder returned no Gradio page.
    """
    arguments = arguments or PageArguments()
    builder = arguments.gradio_builder
    if builder is None:
        return attach_web(app, arguments, folder=folder)
    try:
        from .gradio_page import mount_gradio  # loads Gradio
    except ImportError as exc:
        logger.warning("the standard page is shown alone: %s", exc)
        return attach_web(app, replace(arguments, gradio_builder=None), folder=folder)
    page = attach_web(app, arguments, folder=folder)
    if page is not None:
        mount_gradio(app, page, builder)
    return page


def _with_page(make: Callable[_P, FastAPI]) -> Callable[_P, FastAPI]:
    @functools.wraps(make, assigned=())  # for its signature
    def create_web_interface_app(*args: _P.args, **kwargs: _P.kwargs) -> FastAPI:
        """Build the application of an environment with its web page; arguments as for `create_app`."""
        app = make(*args, **kwargs)
        if not hasattr(app.state, "openenv_web"):
            add_page(app, app.state.openenv_page_arguments)
        return app

    return create_web_interface_app


create_web_interface_app = _with_page(create_app)


def wrap_lifespan(
    app: FastAPI,
    *,
    on_start: Callable[[], object] | None = None,
    on_stop: Callable[[], object] | None = None,
    on_stopped: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Call functions on the server's loop when the application has started, before it stops, and at the very end."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        try:
            async with inner(application) as state:
                if on_start is not None:
                    on_start()
                try:
                    yield state
                finally:
                    if on_stop is not None:
                        on_stop()
        finally:
            if on_stopped is not None:
                await on_stopped()

    app.router.lifespan_context = lifespan


def _rollout_routes(arguments: PageArguments) -> PageRoutePlugin | None:
    """Load the viewer for an environment's rollouts; it belongs to a higher layer, so it registers itself."""
    if arguments.rollout_store is None:
        return None
    routes: PageRoutePlugin = load_plugin("openenv.page_routes", "rollouts")(Path(arguments.rollout_store))
    return routes


class HiddenRoute(Route):
    """A route that the OpenAPI document leaves out."""

    def __init__(self, method: str, path: str, handler: Handler) -> None:
        super().__init__(path, _unused, methods=[method], include_in_schema=False, name=f"{method} {path}")
        self.app = handler


async def _unused(request: Any) -> None:
    """Satisfy Starlette, which wants a function; the handler replaces it."""


async def _web_metadata_signature() -> EnvironmentMetadata:  # type: ignore[empty-body]
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


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    tag: str
    type: str


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, f'"{hashlib.sha256(body).hexdigest()[:24]}"', _TYPES[path.suffix])


class PageFiles:
    """The ASGI handlers of `/`, `/web`, `/web/` and `/web/static/{file}`.

    The files are read when the application is built, so that no request waits for a disk.

    Args:
        visitors: Registers each browser that loads the page; None for a page without an environment.
        framed_by: Further origins that may show this page in a frame.
        index: The file for `/web/`.
        is_embedded: Whether the page usually appears in a frame of another site, which its cookie has to allow.
        folder: The folder of the files.
    """

    def __init__(
        self,
        visitors: Visitors | None,
        framed_by: Iterable[str] = (),
        *,
        index: str = _INDEX,
        is_embedded: bool = False,
        folder: Path = FOLDER,
    ) -> None:
        self._visitors = visitors
        self._is_embedded = is_embedded
        self._index = index
        self._files = {path.name: _read(path) for path in folder.iterdir() if path.suffix in _TYPES}
        ancestors = " ".join(["'self'", *sorted(framed_by)])
        self._headers: HeaderList = [
            (b"content-security-policy", _POLICY.format(ancestors).encode("latin-1", "ignore")),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]

    async def redirect_root(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /`: redirect to `/web/`, or to a relative address if a proxy may have added a prefix."""
        if any(name.startswith(b"x-forwarded-") or name in (b"forwarded", b"via") for name, _ in scope["headers"]):
            await self.redirect(scope, receive, send)
            return
        place = f"{scope.get('root_path', '').rstrip('/')}/web/".encode()
        headers = [(b"location", place), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 307, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def redirect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web`. The address is relative: a proxy may add a prefix."""
        await send({"type": "http.response.start", "status": 307, "headers": _REDIRECT})
        await send({"type": "http.response.body", "body": b""})

    async def index(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/`; gives a new browser a cookie."""
        file = self._files.get(self._index)
        if file is None:
            await respond_json(send, 404, {"detail": "The page is not installed.", "code": "NOT_FOUND"})
            return
        headers: HeaderList = []
        if self._visitors is not None:
            known = cookie(scope, COOKIE)
            new_key = self._visitors.rename(known) if known else self._visitors.new_key()
            self._visitors.of(new_key or known)
            if new_key is not None:
                headers = [visitor_cookie(scope, new_key, is_embedded=self._is_embedded)]
        await self._send(scope, send, file, headers)

    async def static(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/static/{file}`."""
        file = self._files.get(scope["path_params"]["file"])
        if file is None:
            await respond_json(send, 404, {"detail": "There is no such file.", "code": "NOT_FOUND"})
        else:
            await self._send(scope, send, file, ())

    async def _send(self, scope: Scope, send: Send, file: _File, headers: HeaderList) -> None:
        fixed = [(b"etag", file.tag.encode()), *self._headers, *headers]
        if file.tag in (header(scope, b"if-none-match") or ""):
            await send({"type": "http.response.start", "status": 304, "headers": fixed})
            await send({"type": "http.response.body", "body": b""})
            return
        described = [(b"content-type", file.type.encode()), (b"content-length", str(len(file.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": [*described, *fixed]})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else file.body})
