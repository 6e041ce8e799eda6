"""The page's own files: `index.html` and what it loads, with the headers that keep a page to itself.

They are read when the application is made, so that no request waits for a disk. Knows one folder and HTTP's validators;
must not know what is in the files.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec

from fastapi import Body, FastAPI
from starlette.routing import BaseRoute, Route, WebSocketRoute

from .. import settings
from ..server.app import HTTPEnvServer, PageArguments, create_app
from ..server.asgi import Handler, HeaderList, Receive, Scope, Send, cookie, header, respond_json
from ..server.routes import DocumentedRoute
from ..types import EnvironmentMetadata, ServerMode
from .page_description import CustomTab, PageDescription, PageOptions
from .page_routes import Login, OperatorRoutes, PlayRoutes, UiEndpoint, is_https
from .visitor_actions import VisitorActions
from .visitors import COOKIE, Visitors, new_key

FOLDER: Final = Path(__file__).parent / "static"
_INDEX = "index.html"
# Styles may be inline for the pictures that environments draw: a frame made from text inherits this policy. Nothing of
# theirs runs: scripts come from this server only, and their frame allows none.
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

    Args:
        greet: Told the key of each browser that loads the page.
        framed_by: Origins whose pages may show this one in a frame, beside its own.
        is_embedded: Whether the page is usually shown in a frame of another site, so that its cookie has to say so.
        folder: Where the files are.
    """

    def __init__(
        self,
        greet: Callable[[str], object],
        framed_by: Iterable[str] = (),
        *,
        is_embedded: bool = False,
        folder: Path = FOLDER,
    ) -> None:
        self._greet = greet
        self._is_embedded = is_embedded
        self._files = {path.name: _read(path) for path in folder.iterdir() if path.suffix in _TYPES}
        ancestors = " ".join(["'self'", *sorted(framed_by)])
        self._headers: HeaderList = [
            (b"content-security-policy", _POLICY.format(ancestors).encode("latin-1", "ignore")),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]

    async def redirect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /` and `GET /web`. The address is relative: a proxy may have put something in front of it."""
        await send({"type": "http.response.start", "status": 307, "headers": _REDIRECT})
        await send({"type": "http.response.body", "body": b""})

    async def index(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/`; a browser that is new here is given a cookie."""
        file = self._files.get(_INDEX)
        if file is None:
            await respond_json(send, 404, {"detail": "The page is not installed.", "code": "NOT_FOUND"})
            return
        known = cookie(scope, COOKIE)
        key = known or new_key()
        self._greet(key)
        headers: HeaderList = [] if known else [self._visitor_cookie(scope, key)]
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

    def _visitor_cookie(self, scope: Scope, key: str) -> tuple[bytes, bytes]:
        secure = is_https(scope)
        place = "SameSite=None; Secure; Partitioned" if self._is_embedded and secure else "SameSite=Lax"
        mark = "; Secure" if secure and "Secure" not in place else ""
        return b"set-cookie", f"{COOKIE}={key}; Path=/; HttpOnly; {place}{mark}".encode()


# attach: Puts the page onto an application: its routes, behind the gate like all others, and its place in the lifespan.
#
# Knows which parts there are and how they are put together.


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
        self.play = VisitorActions(service)
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


def add_page(app: FastAPI, wish: PageArguments | None = None, *, folder: Path | None = None) -> WebPage | None:
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
    wish = wish or PageArguments()
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
