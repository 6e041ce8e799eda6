"""Every HTTP route of an environment's server and its OpenAPI document; `HTTPEnvServer.register_routes` adds them.

Gym, session and MCP routes are documented by FastAPI from a signature and answered by a bare ASGI handler, so that the
hot path pays nothing for the document. `/metrics`, `/ready` and the Task API have their handlers here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Container, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Body, FastAPI, HTTPException
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute

from openenv._lazy import load_package_version
from openenv.errors import SessionCapacityError
from openenv.protocol.json_values import encode
from openenv.types import (
    EnvironmentMetadata,
    GetTaskRangeRequest,
    GetTaskRequest,
    HealthResponse,
    ListTasksRequest,
    NumTasksRequest,
    ResetRequest,
    ResetResponse,
    SchemaResponse,
    SessionInfo,
    State,
    StepRequest,
    StepResponse,
)

from .access import ADDRESS_TOKEN, AccessPolicy
from .asgi import BodyLimit, Handler, Receive, Scope, Send
from .http_routes import (
    ForkRequest,
    GymRoutes,
    OpenRequest,
    RestoreRequest,
    SessionForked,
    SessionOpened,
    SessionRestored,
    SessionRoutes,
    described,
)
from .mcp.endpoint import McpEndpoint, RpcEndpoint
from .service import EnvService
from .sessions.operations import CALL
from .telemetry.prometheus import CONTENT_TYPE
from .telemetry.server_metrics import ServerMetrics
from .telemetry.watched_calls import CallWatch


class ErrorBody(BaseModel):
    """A refusal: what happened, with a stable code."""

    detail: str
    code: str


class SessionClosed(BaseModel):
    """A session has ended."""

    session_id: str
    closed: bool = True


class EpisodeView(BaseModel):
    """The reward and end of an episode that consists of tool calls, since the last reset."""

    steps: int
    reward: float | None
    total_reward: float
    done: bool
    error: str | None = None
    """Present if the last rewards cannot be trusted: `NON_FINITE_REWARD`."""


class SessionView(SessionInfo):
    """A session, as its orchestrator sees it."""

    state: str
    episode: EpisodeView


class AdmittingRoute(APIRoute):
    """A route that borrows an environment; it answers 503 if the server has no free slot."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI builds."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except SessionCapacityError as exc:
                return JSONResponse(described(exc), 503, headers={"retry-after": "1"})
            except RequestValidationError as exc:
                # FastAPI's own handler fails for an input that JSON cannot express: `1e400`, which is read as infinity.
                return Response(encode({"detail": exc.errors()}), 422, media_type="application/json")

        return handle


@dataclass(frozen=True)
class GetEndpointConfig:
    """A GET route: its path, its handler and its response."""

    path: str
    handler: Callable[[], Any]
    response_model: type[Any]
    tag: str
    summary: str
    description: str


def register_get_endpoints(app: FastAPI, configs: Sequence[GetEndpointConfig]) -> None:
    """Add several GET routes to an application."""
    for config in configs:
        app.router.add_api_route(
            config.path,
            config.handler,
            methods=["GET"],
            response_model=config.response_model,
            tags=[config.tag],
            summary=config.summary,
            description=config.description,
            route_class_override=AdmittingRoute,
        )


FAILURE = "openenv.failure"
"""The key of a scope for the exception of a call that ran already: the route raises it instead of running again."""


class DocumentedRoute(APIRoute):
    """A route with a `signature` for the OpenAPI document and a bare ASGI `handler` for requests.

    It is named after what it does, which names the operation in the document and in clients made from that.
    """

    def __init__(self, path: str, signature: Callable[..., Any], handler: Handler, **kwargs: Any) -> None:
        kwargs.setdefault("name", signature.__name__.lstrip("_").removesuffix("_signature"))
        super().__init__(path, signature, **kwargs)
        self.app = handler
        self._methods = frozenset(self.methods or ())

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match like any route, but without a regular expression for an exact path."""
        if scope["type"] == "http" and scope["path"] == self.path and not scope.get("root_path"):
            match = Match.FULL if scope["method"] in self._methods else Match.PARTIAL
            return match, {"endpoint": self.endpoint, "path_params": {}, "route": self}
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if FAILURE in scope:
            raise scope[FAILURE]
        if scope["method"] in self._methods:
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


# `/docs`, `/redoc` and `/openapi.json` on a server with tokens: a browser cannot add a header to an address, so these
# accept `?token=TOKEN` as well. The page then loads the document with the token. The document declares the bearer
# token, which adds an Authorize button to the page.


SCHEME = "bearer"
_PAGE = [(b"content-type", b"text/html; charset=utf-8"), (b"referrer-policy", b"no-referrer")]


class Documents:
    """The pages about an application's routes.

    Args:
        app: The application.
        access: Returns the tokens that are required.
        guarded: The routes that require them, as pairs of a path and a method in lower case.
    """

    def __init__(self, app: FastAPI, access: Callable[[], AccessPolicy], guarded: Container[tuple[str, str]]) -> None:
        self._app = app
        self._access = access
        self._guarded = guarded
        self._plain = app.openapi

    @staticmethod
    def paths(app: FastAPI) -> set[str | None]:
        """Return the paths of the pages."""
        return {app.openapi_url, app.docs_url, app.redoc_url, app.swagger_ui_oauth2_redirect_url}

    def install(self, routes: Collection[BaseRoute]) -> None:
        """Replace the handlers of the pages and of the document; the routes must not have guards yet."""
        self._app.openapi = self.openapi  # type: ignore[method-assign]
        for route in routes:
            if isinstance(route, Route) and route.path in (self._app.docs_url, self._app.redoc_url):
                route.app = self._with_address_token(route.path, route.app)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document; it declares the token if one is required."""
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

    def _with_address_token(self, path: str, handler: Handler) -> Handler:
        """Return a page's handler: FastAPI's, or ours if the address contains the token."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            token = scope.get(ADDRESS_TOKEN)
            if token is None:
                await handler(scope, receive, send)
                return
            page = self._page(path, token, str(scope.get("root_path", "")).rstrip("/"))
            await send({"type": "http.response.start", "status": 200, "headers": _PAGE})
            await send({"type": "http.response.body", "body": page})

        return handle

    def _page(self, path: str, token: str, root: str) -> bytes:
        """Return a page that loads the document with the token."""
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


OPENTELEMETRY = "opentelemetry.trace"
_SAMPLE = 'openenv_sessions{state="ready"} 3\nopenenv_steps_total 1200\n'


class Readiness(BaseModel):
    """Whether the server admits new sessions, and the facts that a gateway needs.

    Args:
        status: Whether it admits.
        active_sessions: Slots in use.
        max_sessions: Slots there are.
        server: The name of the server as it was started: the ids of its sessions begin with it.
        workers: The processes that share its port.
        hung_workers: Those of them that do not respond.
    """

    status: Literal["ready", "draining"]
    active_sessions: int
    max_sessions: int
    server: str
    workers: int
    hung_workers: int


class MetricsRoutes:
    """`GET /metrics` and `GET /ready`, for Prometheus and load balancers."""

    def __init__(self, service: EnvService) -> None:
        self._manager = service.manager
        self._service = service
        self._is_tracing = False
        self.watch = CallWatch(service.manager)
        self.metrics = ServerMetrics(service.manager, self.watch, info=self._info)
        # With several processes, this asks all of them.
        self.collect: Callable[[], Coroutine[Any, Any, bytes]] | None = None

    def begin(self) -> None:
        """Trace calls if the application has set up OpenTelemetry."""
        if not self._is_tracing and OPENTELEMETRY in sys.modules:
            from .telemetry.watched_calls import trace_if_set_up  # not needed otherwise

            self._is_tracing = trace_if_set_up(self.watch)

    def _info(self) -> dict[str, str]:
        return {
            "environment": self._service.env_name,
            "version": load_package_version(),
            "runner": self._manager.runner.name,
            "mode": self._service.mode.value,
        }

    def routes(self) -> list[APIRoute]:
        """Return the routes; they are the same in every mode."""
        return [
            APIRoute(
                "/metrics",
                self.show,
                name="metrics",
                response_class=PlainTextResponse,
                tags=["Health"],
                summary="Show metrics",
                description="Sessions, queue, steps, times by phase, errors by code and memory, in Prometheus' text "
                "format. Calls are timed from the first reading on.",
                responses={200: {"content": {"text/plain": {"example": _SAMPLE}}}},
            ),
            APIRoute(
                "/ready",
                self.ready,
                response_model=Readiness,
                tags=["Health"],
                summary="Say whether new sessions are opened",
                description="Readiness check: unlike `/health`, it fails while the server shuts down.",
                responses={503: {"model": Readiness, "description": "The server is shutting down"}},
            ),
        ]

    async def show(self) -> Response:
        """Handle `GET /metrics`."""
        text = self.metrics.text() if self.collect is None else await self.collect()
        return Response(text, media_type=CONTENT_TYPE)

    async def ready(self) -> Response:
        """Handle `GET /ready`."""
        manager = self._manager
        shown = {
            "status": "draining" if manager.is_draining else "ready",
            "active_sessions": manager.active,
            "max_sessions": manager.max_sessions,
            "server": manager.peers.boot,
            "workers": manager.peers.processes,
            "hung_workers": manager.peers.hung_processes,
        }
        return JSONResponse(shown, 503 if manager.is_draining else 200, {"cache-control": "no-store"})


_SPLIT_TYPES = frozenset({"train", "validation", "test"})
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "There is no such task"},
    404: {"description": "No environment of that name is served here"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    500: {"description": "The environment failed"},
    501: {"description": "The environment has no such catalogue"},
    503: {"model": ErrorBody, "description": "The server is shutting down"},
}


class TaskRoutes:
    """The handlers of the Task API; each call runs on a new environment."""

    def __init__(self, service: EnvService) -> None:
        self._service = service

    def register(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        router = APIRouter(tags=["Task API"], route_class=AdmittingRoute)
        router.add_api_route("/list_environments", self.list_environments, methods=["GET"])
        router.add_api_route("/{env_name}/splits", self.splits, methods=["GET"], responses=_ERRORS)
        router.add_api_route("/{env_name}/tasks", self.tasks, methods=["POST"], responses=_ERRORS)
        router.add_api_route("/{env_name}/num_tasks", self.num_tasks, methods=["POST"], responses=_ERRORS)
        router.add_api_route("/{env_name}/task", self.task, methods=["POST"], responses=_ERRORS)
        router.add_api_route("/{env_name}/task_range", self.task_range, methods=["POST"], responses=_ERRORS)
        for route in router.routes:
            assert isinstance(route, AdmittingRoute)
            route.app = BodyLimit(route.app, lambda: self._service.options.max_message_bytes)
        app.router.routes.extend(router.routes)

    async def list_environments(self) -> list[str]:
        """Name the environments served here."""
        return [self._service.env_name]

    async def splits(self, env_name: str) -> list[Any]:
        """List the splits of an environment's tasks."""
        return [_split(item) for item in await self._call(env_name, "list_splits", shape=list)]

    async def tasks(self, env_name: str, request: ListTasksRequest) -> dict[str, Any]:
        """List the tasks of a split."""
        tasks = await self._call(env_name, "list_tasks", request.split, shape=list)
        return {"tasks": jsonable_encoder(tasks), "env_name": self._service.env_name}

    async def num_tasks(self, env_name: str, request: NumTasksRequest) -> dict[str, int]:
        """Count the tasks of a split."""
        return {"num_tasks": int(await self._call(env_name, "num_tasks", request.split))}

    async def task(self, env_name: str, request: GetTaskRequest) -> dict[str, Any]:
        """Return one task."""
        return {"task": jsonable_encoder(await self._call(env_name, "get_task", request.split, request.index))}

    async def task_range(self, env_name: str, request: GetTaskRangeRequest) -> dict[str, Any]:
        """Return some tasks of a split."""
        arguments = (request.split, request.start, request.stop)
        return {"tasks": jsonable_encoder(await self._call(env_name, "get_task_range", *arguments, shape=list))}

    async def _call(
        self, env_name: str, method: str, *arguments: Any, shape: Callable[[Any], Any] = lambda result: result
    ) -> Any:
        """Call a method of the catalogue. Read a lazy result before the environment closes.

        Args:
            shape: Applied to the result, in the environment's thread.
        """
        if env_name.lower() != self._service.env_name.lower():
            raise HTTPException(404, f"unknown environment '{env_name}'")
        unsupported = HTTPException(501, f"{method} is not supported for this environment")

        def call(env: Any) -> Any:
            function = getattr(env, method, None)
            if not callable(function):
                raise NotImplementedError(method)
            result = function(*arguments)
            return result if inspect.isawaitable(result) or inspect.isasyncgen(result) else shape(result)

        try:
            async with self._service.manager.borrow() as session:
                result = await session.run(CALL, call)
                if inspect.isasyncgen(result):
                    return [item async for item in result]
                return shape(await result) if inspect.isawaitable(result) else result
        except NotImplementedError:
            raise unsupported from None
        except IndexError:
            raise HTTPException(400, "Invalid task index") from None
        except (KeyError, ValueError) as exc:  # environments report an unknown split with these
            raise HTTPException(400, f"{method}: {self._service.errors.text(exc)}") from exc


def _split(item: Any) -> Any:
    if isinstance(item, str):
        return {"name": item, "type": item if item in _SPLIT_TYPES else "validation"}
    return item.model_dump() if isinstance(item, BaseModel) else item


# The routes of an environment. Handlers are bare ASGI; signatures exist for the OpenAPI document only.

_REFUSED: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "The server asks for a token"},
    403: {"model": ErrorBody, "description": "The token's role does not allow this, or a foreign web page asks"},
}
_SESSION_ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "No session has the name that was sent"},
    410: {"model": ErrorBody, "description": "The session has ended and its episode with it"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    500: {"description": "The environment failed"},
    503: {"model": ErrorBody, "description": "Every session slot is taken"},
}


def gym_routes(service: EnvService, gym: GymRoutes) -> list[BaseRoute]:
    """Return `/reset`, `/step`, `/state` and `/sessions`: simulation mode only."""
    sessions = SessionRoutes(service)
    control: dict[str, Any] = {"tags": ["Environment Control"], "responses": {**_REFUSED, **_SESSION_ERRORS}}
    copying: dict[str, Any] = {
        "tags": ["Environment Control"],
        "responses": {**_REFUSED, **_SESSION_ERRORS, 409: {"model": ErrorBody, "description": "It cannot be copied"}},
    }
    state_cls = _documentable(service.state_cls)
    return [
        DocumentedRoute(
            "/reset",
            _reset_signature,
            gym.reset,
            methods=["POST"],
            response_model=ResetResponse,
            summary="Begin an episode",
            description="Send `X-OpenEnv-Session: new` to open a session that `/step` and `/state` can continue; "
            "its name comes back in the same header.",
            **control,
        ),
        DocumentedRoute(
            "/step",
            _step_signature,
            gym.step,
            methods=["POST"],
            response_model=StepResponse,
            summary="Take an action",
            description="Send `X-OpenEnv-Session` with the name that `/reset` answered to continue that episode.",
            **control,
        ),
        DocumentedRoute(
            "/state",
            _state_signature,
            gym.state,
            methods=["GET"],
            response_model=state_cls,
            summary="Show the state",
            description="Send `X-OpenEnv-Session` to see the state of that episode.",
            tags=["State Management"],
            responses={code: body for code, body in _SESSION_ERRORS.items() if code != 413},
        ),
        DocumentedRoute(
            "/sessions",
            _open_signature,
            sessions.open,
            methods=["POST"],
            response_model=SessionOpened,
            status_code=201,
            summary="Open a session",
            description="Build an environment, after waiting for a slot where `wait_s` says so. `/reset`, `/step`, "
            "`/state` take its name in `X-OpenEnv-Session`.",
            tags=["Environment Control"],
            responses={**_REFUSED, **{code: _SESSION_ERRORS[code] for code in (413, 500, 503)}},
        ),
        DocumentedRoute(
            "/sessions/{session_id}",
            _describe_signature,
            sessions.describe,
            methods=["GET"],
            response_model=SessionView,
            summary="Show a session",
            description="Its state, its steps, and what the tool calls of an agent have led to: reward and end of "
            "an episode are shown here and never to the agent.",
            tags=["State Management"],
            responses={**_REFUSED, **{code: _SESSION_ERRORS[code] for code in (404, 410)}},
        ),
        DocumentedRoute(
            "/sessions/{session_id}",
            _close_signature,
            sessions.close,
            methods=["DELETE"],
            response_model=SessionClosed,
            summary="End a session",
            description="Close the environment of a session that `/reset` has opened, and free its slot.",
            tags=["Environment Control"],
            responses={**_REFUSED, **{code: _SESSION_ERRORS[code] for code in (404, 410)}},
        ),
        DocumentedRoute(
            "/sessions/{session_id}/fork",
            _fork_signature,
            gym.fork,
            methods=["POST"],
            response_model=SessionForked,
            summary="Copy a session",
            description="Open sessions that go on from where this one is, each with a copy of its environment.",
            **copying,
        ),
        DocumentedRoute(
            "/sessions/{session_id}/restore",
            _restore_signature,
            gym.restore,
            methods=["POST"],
            response_model=SessionRestored,
            summary="Go on from another session",
            description="Put a copy of another session's environment, named by its token, in place of this one's.",
            **copying,
        ),
    ]


def add_info_routes(app: FastAPI, service: EnvService, mcp: McpEndpoint) -> None:
    """Add `/metadata`, `/health`, `/schema` and `/mcp`: both modes."""

    async def schema() -> SchemaResponse:
        return service.schema()

    register_get_endpoints(
        app,
        [
            GetEndpointConfig(
                "/metadata",
                service.metadata,
                EnvironmentMetadata,
                "Environment Info",
                "Describe the environment",
                "Name, version, author and README of the environment.",
            ),
            GetEndpointConfig(
                "/health", _health, HealthResponse, "Health", "Say whether the server is alive", "Liveness check."
            ),
            GetEndpointConfig(
                "/schema",
                schema,
                SchemaResponse,
                "Schema",
                "Show the JSON schemas",
                "Schemas of action, observation and state.",
            ),
        ],
    )
    app.router.routes += [
        DocumentedRoute(
            "/mcp",
            _rpc_signature,
            mcp,
            methods=["POST"],
            tags=["Environment Info"],
            summary="MCP and JSON-RPC",
            description="Standard MCP (Streamable HTTP), and OpenEnv's own `tools/list`, `tools/call`, "
            "`openenv/session/create` and `openenv/session/close`.",
            responses=_REFUSED,
        ),
        Route("/mcp", mcp, methods=["GET", "DELETE", "PUT", "PATCH", "OPTIONS"], include_in_schema=False),
        WebSocketRoute("/mcp", RpcEndpoint(service), name="mcp"),
    ]


async def _health() -> HealthResponse:
    return HealthResponse()


async def _reset_signature(request: ResetRequest = Body(default_factory=ResetRequest)) -> None:  # noqa: B008
    """Documents `POST /reset`."""


async def _step_signature(request: StepRequest) -> None:
    """Documents `POST /step`."""


async def _state_signature() -> None:
    """Documents `GET /state`."""


async def _open_signature(request: OpenRequest = Body(default_factory=OpenRequest)) -> None:  # noqa: B008
    """Documents `POST /sessions`."""


async def _describe_signature(session_id: str) -> None:
    """Documents `GET /sessions/{session_id}`."""


async def _close_signature(session_id: str) -> None:
    """Documents `DELETE /sessions/{session_id}`."""


async def _fork_signature(session_id: str, request: ForkRequest = Body(default_factory=ForkRequest)) -> None:  # noqa: B008
    """Documents `POST /sessions/{session_id}/fork`."""


async def _restore_signature(session_id: str, request: RestoreRequest) -> None:
    """Documents `POST /sessions/{session_id}/restore`."""


def _documentable(model: type[Any]) -> type[Any]:
    """Document a model without a JSON schema as any state; responses still contain all fields."""
    try:
        TypeAdapter(model).json_schema(mode="serialization")
    except Exception:  # pydantic reports this in several ways
        return State
    return model


async def _rpc_signature(request: dict[str, Any]) -> dict[str, Any]:
    """Documents `POST /mcp`."""
    return request
