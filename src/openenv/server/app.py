"""Application factories: an environment class in, a FastAPI application out.

Knows how an application is put together; routes and sessions are elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from fastapi import Body, FastAPI
from pydantic import TypeAdapter
from starlette.routing import BaseRoute, Route, WebSocketRoute

from ..env.environment import Environment
from ..runners import ProcessOptions
from ..sessions.lifetime import SessionLimits
from ..sessions.manager import SessionManager
from ..settings import allowed_origins, max_message_mb, runner_name, server_mode, session_timeout, web_interface_enabled
from ..settings import env_processes as configured_processes
from ..settings import max_agent_sessions as configured_max_agent_sessions
from ..settings import max_sessions as configured_max_sessions
from ..settings import redact_errors as errors_are_redacted
from ..settings import session_grace as configured_grace
from ..settings import sessions_per_process as configured_sessions_per_process
from ..types import (
    ConcurrencyConfig,
    EnvironmentMetadata,
    HealthResponse,
    ResetRequest,
    ResetResponse,
    SchemaResponse,
    ServerCapacityStatus,
    ServerMode,
    SessionInfo,
    State,
    StepRequest,
    StepResponse,
)
from .access import AccessPolicy, Gate, OriginPolicy
from .http_routes import GymRoutes, OpenRequest, SessionOpened, SessionRoutes
from .mcp.endpoint import McpEndpoint, RpcEndpoint
from .routes import (
    DocumentedRoute,
    Documents,
    ErrorBody,
    GetEndpointConfig,
    MetricsRoutes,
    SessionClosed,
    SessionView,
    TaskRoutes,
    register_get_endpoints,
)
from .service import DEFAULT_MAX_MESSAGE_BYTES, EnvService, ServiceOptions
from .ws import WsEndpoint

# lifespan: Start-up and shutdown of a served environment, composed with whatever lifespan the application brings.
#
# Knows Starlette's lifespan hook and the session manager's drain.


def add_to_lifespan(app: FastAPI, manager: SessionManager, *, on_start: Callable[[], object]) -> None:
    """Let the application call back when it starts, and drain the manager when it shuts down."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        manager.resume()
        async with inner(application) as state:
            on_start()
            try:
                yield state
            finally:
                await manager.drain()

    app.router.lifespan_context = lifespan


# compat: `HTTPEnvServer`: the constructor and methods that existing code knows, on top of `EnvService`.
#
# Knows which routes a mode has; what they do is elsewhere.


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


class HTTPEnvServer:
    """Serves one environment class.

    Args:
        env: The environment class, or a function without arguments that returns an environment.
        action_cls: The action model.
        observation_cls: The observation model.
        max_concurrent_envs: Sessions held at once; by default 1.
        concurrency_config: The same and a session timeout, as one object; excludes `max_concurrent_envs`.
        env_name: Name in the Task API; by default the factory's.
        state_cls: The state model; by default what the environment declares.
        reset_observation_cls: Model of the first observation where it differs.
        runner: Where environment code runs: `auto` (default), `thread`, `inline`, `process`.
        env_processes: With `process`: over how many processes sessions are spread; by default
            `OPENENV_ENV_PROCESSES`, or as many as there are cores.
        sessions_per_process: With `process`: how many sessions one process may hold; by default
            `OPENENV_SESSIONS_PER_PROCESS`, or any number.
        limits: All limits at once, for full control; excludes the two concurrency arguments.
        access: The tokens that are asked for; by default those in the settings, and none if there are none.
        session_grace_s: How long a session is kept without a connection; by default `OPENENV_SESSION_GRACE`, or 60 s.
        max_agent_sessions: Sessions held at once that agents have opened; by default `OPENENV_MAX_AGENT_SESSIONS`, or
            any number.
        redact_errors: Whether the texts of exceptions are kept from clients; by default `OPENENV_REDACT_ERRORS`.
        max_message_bytes: The largest request that is read; by default `OPENENV_MAX_MESSAGE_MB`, or 100 MB.

    Raises:
        TypeError: `env` is an instance.
        ValueError: Both `max_concurrent_envs` and `concurrency_config` are given, or there is no such runner.
        NotSendable: The runner is `process`, and `env` cannot be sent to another process.
        ConcurrencyConfigurationError: The class does not support so many sessions.
    """

    def __init__(
        self,
        env: Callable[[], Environment[Any, Any, Any]],
        action_cls: type[Any] | None,
        observation_cls: type[Any] | None,
        max_concurrent_envs: int | None = None,
        concurrency_config: ConcurrencyConfig | None = None,
        env_name: str | None = None,
        state_cls: type[Any] = State,
        *,
        reset_observation_cls: type[Any] | None = None,
        runner: str | None = None,
        limits: SessionLimits | None = None,
        access: AccessPolicy | None = None,
        redact_errors: bool | None = None,
        max_message_bytes: int | None = None,
        session_grace_s: float | None = None,
        max_agent_sessions: int | None = None,
        env_processes: int | None = None,
        sessions_per_process: int | None = None,
    ) -> None:
        self.concurrency_config = _concurrency(max_concurrent_envs, concurrency_config, limits)
        self.action_cls = action_cls
        self.observation_cls = observation_cls
        self._env_factory = env
        self._gate = Gate(OriginPolicy(allowed_origins()), AccessPolicy.from_settings() if access is None else access)
        self._mcp: McpEndpoint | None = None
        self.stream_enders: list[Callable[[], None]] = []
        self.service = EnvService(
            env,
            action_cls=action_cls,
            observation_cls=observation_cls,
            state_cls=state_cls,
            reset_observation_cls=reset_observation_cls,
            env_name=env_name,
            options=ServiceOptions(
                limits=limits or _limits(self.concurrency_config, session_grace_s, max_agent_sessions),
                runner=runner or runner_name() or "auto",
                processes=_processes(env_processes, sessions_per_process),
                max_message_bytes=_message_limit(max_message_bytes),
                redact_errors=errors_are_redacted() if redact_errors is None else redact_errors,
            ),
        )

        self.monitoring = MetricsRoutes(self.service)

    @property
    def manager(self) -> SessionManager:
        """The sessions of this server."""
        return self.service.manager

    @property
    def active_sessions(self) -> int:
        """Session slots in use."""
        return self.manager.active

    @property
    def max_concurrent_envs(self) -> int:
        """Session slots there are."""
        return self.manager.max_sessions

    @property
    def is_concurrency_safe(self) -> bool:
        """Whether the environment class supports concurrent sessions."""
        return self.manager.is_concurrency_safe

    def get_capacity_status(self) -> ServerCapacityStatus:
        """Return slots in use and slots there are."""
        limit = self.manager.max_sessions
        return ServerCapacityStatus.from_counts(min(self.manager.active, limit), limit)

    def get_session_info(self, session_id: str) -> SessionInfo | None:
        """Describe a session, or return None."""
        return self.manager.info(session_id)

    @property
    def access(self) -> AccessPolicy:
        """The tokens that are asked for."""
        return self._gate.access

    def reconfigure(
        self,
        *,
        sessions: int | None = None,
        session_timeout_s: float | None = None,
        runner: str | None = None,
        access: AccessPolicy | None = None,
        max_message_bytes: int | None = None,
        session_grace_s: float | None = None,
        max_agent_sessions: int | None = None,
        env_processes: int | None = None,
        sessions_per_process: int | None = None,
    ) -> None:
        """Change limits, runner or tokens before the first session is opened, as a command line may ask.

        Raises:
            ConcurrencyConfigurationError: The class does not support so many sessions.
            RuntimeError: Sessions are open.
        """
        limits, config = self.manager.limits, self.concurrency_config
        if sessions is not None:
            limits = replace(limits, sessions=sessions)
            config = config.model_copy(update={"max_concurrent_envs": sessions})
        if session_timeout_s is not None:
            limits = _expiring(limits, session_timeout_s)
            config = config.model_copy(update={"session_timeout": session_timeout_s})
        limits = _with(limits, session_grace_s, max_agent_sessions)
        processes = self.service.options.processes
        if env_processes is not None:
            processes = replace(processes, processes=env_processes)
        if sessions_per_process is not None:
            processes = replace(processes, sessions_each=sessions_per_process)
        self.service.reconfigure(limits, runner=runner, processes=processes, max_message_bytes=max_message_bytes)
        self.concurrency_config = config
        if access is not None:
            self._gate.access = access

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Add the routes of a mode to an application, and the drain to its shutdown.

        Raises:
            ValueError: There is no such mode.
        """
        mode = parse_mode(mode)
        self.service.mode = mode
        known = {id(route) for route in app.router.routes}
        if mode is ServerMode.SIMULATION:
            self._register_gym_routes(app)
        self._register_info_routes(app)
        app.router.routes += self.monitoring.routes()
        app.router.routes.append(WebSocketRoute("/ws", WsEndpoint(self.service), name="ws"))
        TaskRoutes(self.service).register(app)
        # Last of all. Other routes of an application are its own business, but for the documents about these.
        documents = Documents.paths(app)
        ours = [
            route for route in app.router.routes if id(route) not in known or getattr(route, "path", None) in documents
        ]
        Documents(app, lambda: self._gate.access, self._gate.guarded).install(ours)
        self._gate.enclose(ours, report=self.manager.report_error, documents=documents)
        add_to_lifespan(app, self.manager, on_start=self.monitoring.begin)

    def guard(self, routes: Iterable[BaseRoute]) -> None:
        """Put the gate in front of further routes: those of the web page."""
        self._gate.enclose(routes, report=self.manager.report_error)

    def end_streams(self) -> None:
        """End the event streams that are open, since nobody else will: for whoever shuts a server down."""
        if self._mcp is not None:
            self._mcp.episodes.end_streams()
        for end in self.stream_enders:
            end()

    def _gym_routes(self) -> GymRoutes:
        return GymRoutes(self.service)

    def _register_gym_routes(self, app: FastAPI) -> None:
        gym = self._gym_routes()
        sessions = SessionRoutes(self.service)
        control: dict[str, Any] = {"tags": ["Environment Control"], "responses": {**_REFUSED, **_SESSION_ERRORS}}
        state_cls = _documentable(self.service.state_cls)
        app.router.routes += [
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
                description="Build an environment, after waiting for a slot if asked to. `/reset`, `/step`, `/state` "
                "take its name in `X-OpenEnv-Session`.",
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
        ]

    def _register_info_routes(self, app: FastAPI) -> None:
        register_get_endpoints(
            app,
            [
                GetEndpointConfig(
                    "/metadata",
                    self.service.metadata,
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
                    self._schema,
                    SchemaResponse,
                    "Schema",
                    "Show the JSON schemas",
                    "Schemas of action, observation and state.",
                ),
            ],
        )
        self._mcp = McpEndpoint(self.service)
        app.router.routes += [
            DocumentedRoute(
                "/mcp",
                _rpc_signature,
                self._mcp,
                methods=["POST"],
                tags=["Environment Info"],
                summary="MCP and JSON-RPC",
                description="Standard MCP (Streamable HTTP), and OpenEnv's own `tools/list`, `tools/call`, "
                "`openenv/session/create` and `openenv/session/close`.",
                responses=_REFUSED,
            ),
            Route("/mcp", self._mcp, methods=["GET", "DELETE", "PUT", "PATCH", "OPTIONS"], include_in_schema=False),
            WebSocketRoute("/mcp", RpcEndpoint(self.service), name="mcp"),
        ]

    async def _schema(self) -> SchemaResponse:
        return self.service.schema()


def parse_mode(mode: ServerMode | str) -> ServerMode:
    """Read a mode's name in any case.

    Raises:
        ValueError: There is no such mode.
    """
    try:
        return ServerMode(mode.lower() if isinstance(mode, str) and not isinstance(mode, ServerMode) else mode)
    except ValueError:
        raise ValueError(f"Invalid mode {mode!r}: choose 'simulation' or 'production'") from None


def _concurrency(
    max_concurrent_envs: int | None, config: ConcurrencyConfig | None, limits: SessionLimits | None
) -> ConcurrencyConfig:
    if sum(given is not None for given in (max_concurrent_envs, config, limits)) > 1:
        raise ValueError("Give only one of max_concurrent_envs, concurrency_config and limits")
    if config is not None:
        return config
    sessions = limits.sessions if limits is not None else max_concurrent_envs
    if sessions is None:
        sessions = configured_max_sessions()
    timeout = limits.idle_s if limits is not None else session_timeout()
    return ConcurrencyConfig(max_concurrent_envs=1 if sessions is None else sessions, session_timeout=timeout)


def _limits(config: ConcurrencyConfig, grace_s: float | None, agents: int | None) -> SessionLimits:
    limits = SessionLimits(sessions=config.max_concurrent_envs)
    if config.session_timeout is not None:
        limits = _expiring(limits, config.session_timeout)
    return _with(
        limits,
        configured_grace() if grace_s is None else grace_s,
        configured_max_agent_sessions() if agents is None else agents,
    )


def _with(limits: SessionLimits, grace_s: float | None, agents: int | None) -> SessionLimits:
    """Return limits with those that are given in place of their own."""
    if grace_s is not None and not (grace_s >= 0 and isfinite(grace_s)):
        raise ValueError(f"the grace period must be a number of seconds, not {grace_s!r}")
    if agents is not None and agents < 0:
        raise ValueError(f"max_agent_sessions must not be negative, not {agents}")
    grace_s = limits.grace_s if grace_s is None else grace_s
    return replace(limits, grace_s=grace_s, agents=limits.agents if agents is None else agents)


def _message_limit(max_message_bytes: int | None) -> int:
    if max_message_bytes is None:
        megabytes = max_message_mb()
        max_message_bytes = DEFAULT_MAX_MESSAGE_BYTES if megabytes is None else int(megabytes * 1024 * 1024)
    if max_message_bytes <= 0:
        raise ValueError(f"max_message_bytes must be positive, not {max_message_bytes}")
    return max_message_bytes


def _processes(env_processes: int | None, sessions_per_process: int | None) -> ProcessOptions:
    return ProcessOptions(
        processes=configured_processes() if env_processes is None else env_processes,
        sessions_each=configured_sessions_per_process() if sessions_per_process is None else sessions_per_process,
    )


def _expiring(limits: SessionLimits, timeout_s: float) -> SessionLimits:
    return replace(limits, idle_s=timeout_s, soft_idle_s=min(timeout_s, limits.soft_idle_s))


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


def _documentable(model: type[Any]) -> type[Any]:
    """A model that JSON schema cannot express is documented as any state; what is sent stays whole."""
    try:
        TypeAdapter(model).json_schema(mode="serialization")
    except Exception:  # pydantic reports this in several ways
        return State
    return model


async def _rpc_signature(request: dict[str, Any]) -> dict[str, Any]:
    """Documents `POST /mcp`."""
    return request


_TITLE = "OpenEnv Environment HTTP API"
_API_VERSION = "1.0.0"
_DESCRIPTION = (
    "Serves one environment. Over WebSocket connect to `/ws`; over HTTP call `/reset` with `X-OpenEnv-Session: new` "
    "and send the name that comes back with each `/step` and `/state`."
)
_HOT = {path: rank for rank, path in enumerate(("/step", "/ws", "/reset", "/state", "/mcp", "/health"))}
_TAGS = [
    {"name": "Environment Control", "description": "Begin episodes and take actions"},
    {"name": "State Management", "description": "Look at the state of an episode"},
    {"name": "Environment Info", "description": "What is served here"},
    {"name": "Schema", "description": "JSON schemas of the models"},
    {"name": "Health", "description": "Whether the server is alive"},
    {"name": "Task API", "description": "The environment's catalogue of tasks"},
]


@dataclass(frozen=True, slots=True)
class PageArguments:
    """What an application says about its web page.

    Args:
        gradio_builder: Builds a Gradio page of the environment's own.
        tab_name: Label of that page's tab.
        tab_is_primary: Whether that tab comes first.
        shows_default: Whether the standard page is there as well.
        title: Title of the page, in place of the environment's name.
    """

    gradio_builder: Callable[..., Any] | None = None
    tab_name: str = "Custom"
    tab_is_primary: bool = False
    shows_default: bool = True
    title: str | None = None


def create_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Any],
    observation_cls: type[Any],
    env_name: str | None = None,
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    gradio_builder: Callable[..., Any] | None = None,
    custom_tab_name: str = "Custom",
    custom_tab_primary: bool = False,
    show_default_tab: bool = True,
    title_override: str | None = None,
    state_cls: type[Any] = State,
    *,
    mode: ServerMode | str | None = None,
    reset_observation_cls: type[Any] | None = None,
    runner: str | None = None,
    access: AccessPolicy | None = None,
    redact_errors: bool | None = None,
    max_message_bytes: int | None = None,
    session_grace_s: float | None = None,
    max_agent_sessions: int | None = None,
    env_processes: int | None = None,
    sessions_per_process: int | None = None,
) -> FastAPI:
    """Build the application of an environment.

    With `ENABLE_WEB_INTERFACE` (`true`, `1` or `yes`) it has a web page at `/web`; under `openenv serve` it always has.

    Args:
        env: The environment class, or a function without arguments that returns an environment.
        action_cls: The action model.
        observation_cls: The observation model.
        env_name: Name in the Task API and on the page.
        max_concurrent_envs: Sessions held at once; by default 1.
        concurrency_config: The same and a session timeout, as one object.
        gradio_builder: Builds a Gradio page of the environment's own, shown as a tab of the web page; needs the extra
            `openenv[gradio]`.
        custom_tab_name: Label of that page's tab.
        custom_tab_primary: Whether that tab comes first.
        show_default_tab: Whether the standard page is there as well.
        title_override: Title of the page.
        state_cls: The state model; by default what the environment declares.
        mode: `simulation` (default, or `OPENENV_MODE`) or `production`.
        reset_observation_cls: Model of the first observation where it differs.
        runner: Where environment code runs: `auto` (default), `thread`, `inline`, `process`.
        access: The tokens that are asked for; by default those in `OPENENV_TOKEN` and its kin, and none without.
        redact_errors: Whether the texts of the environment's exceptions are kept from clients.
        max_message_bytes: The largest request that is read; by default 100 MB.
        session_grace_s: How long a session is kept for a client whose connection broke; by default 60 s, 0 for not at
            all.
        max_agent_sessions: Sessions held at once that agents have opened, so that some are left for the orchestrator;
            by default any number.
        env_processes: With the `process` runner: over how many processes sessions are spread; by default as many as
            there are cores.
        sessions_per_process: With the `process` runner: how many sessions one process may hold; by default any number.
    """
    app = create_fastapi_app(
        env,
        action_cls,
        observation_cls,
        max_concurrent_envs,
        concurrency_config,
        env_name,
        state_cls,
        mode=mode,
        reset_observation_cls=reset_observation_cls,
        runner=runner,
        access=access,
        redact_errors=redact_errors,
        max_message_bytes=max_message_bytes,
        session_grace_s=session_grace_s,
        max_agent_sessions=max_agent_sessions,
        env_processes=env_processes,
        sessions_per_process=sessions_per_process,
    )
    wish = PageArguments(gradio_builder, custom_tab_name, custom_tab_primary, show_default_tab, title_override)
    app.state.openenv_page_wish = wish  # for `openenv serve`, which has a page in any case
    if web_interface_enabled():
        from ..web.web_page import add_page  # servers without the page do not load it

        add_page(app, wish)
    return app


def create_fastapi_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Any],
    observation_cls: type[Any],
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    env_name: str | None = None,
    state_cls: type[Any] = State,
    *,
    mode: ServerMode | str | None = None,
    reset_observation_cls: type[Any] | None = None,
    runner: str | None = None,
    access: AccessPolicy | None = None,
    redact_errors: bool | None = None,
    max_message_bytes: int | None = None,
    session_grace_s: float | None = None,
    max_agent_sessions: int | None = None,
    env_processes: int | None = None,
    sessions_per_process: int | None = None,
) -> FastAPI:
    """Build the application of an environment without a web page; arguments as for `create_app`."""
    server = HTTPEnvServer(
        env,
        action_cls,
        observation_cls,
        max_concurrent_envs,
        concurrency_config,
        env_name,
        state_cls,
        reset_observation_cls=reset_observation_cls,
        runner=runner,
        access=access,
        redact_errors=redact_errors,
        max_message_bytes=max_message_bytes,
        session_grace_s=session_grace_s,
        max_agent_sessions=max_agent_sessions,
        env_processes=env_processes,
        sessions_per_process=sessions_per_process,
    )
    app = new_application()
    app.state.openenv_server = server
    server.register_routes(app, parse_mode(server_mode() if mode is None else mode))
    # Routes are tried in order: the ones that are called all the time come first.
    app.router.routes.sort(key=lambda route: _HOT.get(getattr(route, "path", ""), len(_HOT)))
    return app


def new_application() -> FastAPI:
    """Return an empty application with the title, version and tags of an environment's API."""
    return FastAPI(title=_TITLE, version=_API_VERSION, description=_DESCRIPTION, openapi_tags=_TAGS)
