"""The composition root: `create_app` and `HTTPEnvServer` assemble an application from an environment class.

Builds the options, the service with its sessions, and the routes of a mode. Contains no behaviour of routes or
sessions.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute, WebSocketRoute
from typing_extensions import Unpack

from openenv import settings
from openenv.env.environment import Environment
from openenv.types import ConcurrencyConfig, ServerCapacityStatus, ServerMode, SessionInfo, State

from .access import AccessGate, AccessPolicy, OriginPolicy
from .asgi import Receive
from .fast.install import config_of_request, install, prepared_server, serves
from .http_routes import GymRoutes
from .mcp.endpoint import McpEndpoint
from .options import ServerArguments, ServerOptions, ServerOverrides, takes_server_arguments
from .process_tuning import FileWatch
from .routes import Documents, MetricsRoutes, TaskRoutes, add_info_routes, gym_routes
from .runners import loop_local
from .service import EnvService, ServedModels
from .sessions.events import SessionEvent
from .sessions.manager import SessionManager
from .sessions.peers import peers_of_process
from .slow_clients import PartialRequests, UnreadReplies
from .ws import WsEndpoint
from .ws_turns import HarnessEndpoint, may_serve_turns

logger = logging.getLogger(__name__)

_TITLE = "OpenEnv Environment HTTP API"
_API_VERSION = "1.0.0"
_SAME_SIGNAL_S = 0.5
_LOOK_S = 0.1
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
    """An application's options for its web page.

    Args:
        gradio_builder: Builds a custom Gradio page.
        tab_name: Label of the custom page's tab.
        tab_is_primary: Whether that tab comes first.
        shows_default: Whether to show the standard page as well.
        title: Title of the page; by default the environment's name.
        rollout_store: The folder of the environment's rollouts; the page shows them in a tab.
    """

    gradio_builder: Callable[..., Any] | None = None
    tab_name: str = "Custom"
    tab_is_primary: bool = False
    shows_default: bool = True
    title: str | None = None
    rollout_store: Path | None = None


class HTTPEnvServer:
    """Serves one environment class.

    Args:
        env: The environment class, or a function without arguments that returns an environment.
        action_cls: The action model.
        observation_cls: The observation model.
        max_concurrent_envs: Sessions held at once; by default 1.
        concurrency_config: The same and a session timeout, as one object; excludes `max_concurrent_envs`.
        env_name: Name in the Task API; by default the factory's.
        state_cls: The state model; by default the environment's declaration.
        reset_observation_cls: Model of the first observation, if it differs.
        arguments: The options in `ServerArguments`; defaults come from the settings.

    Raises:
        TypeError: `env` is an instance, or an option is unknown.
        ValueError: Both `max_concurrent_envs` and `concurrency_config` are set, or the runner is unknown.
        NotSendable: The runner is `process`, and `env` cannot be sent to another process.
        ConcurrencyConfigurationError: The class does not support so many sessions.
    """

    @takes_server_arguments
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
        **arguments: Unpack[ServerArguments],
    ) -> None:
        options = ServerOptions.build(arguments, sessions=max_concurrent_envs, concurrency=concurrency_config)
        self.concurrency_config = concurrency_config or _concurrency(options, arguments)
        self.action_cls = action_cls
        self.observation_cls = observation_cls
        self._env_factory = env  # subclasses in published environments call it
        self.stream_enders: list[Callable[[], None]] = []
        self.service = EnvService(
            env,
            ServedModels(action_cls, observation_cls, state_cls, reset_observation_cls),
            options=options,
            env_name=env_name,
        )
        self.monitoring = MetricsRoutes(self.service)
        self._gate = AccessGate(OriginPolicy(settings.allowed_origins()), options.access)
        self._mcp: McpEndpoint | None = None

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
        """The number of session slots."""
        return self.manager.max_sessions

    @property
    def is_concurrency_safe(self) -> bool:
        """Whether the environment class supports concurrent sessions."""
        return self.manager.is_concurrency_safe

    def get_capacity_status(self) -> ServerCapacityStatus:
        """Return the numbers of used and of all slots."""
        limit = self.manager.max_sessions
        return ServerCapacityStatus.from_counts(min(self.manager.active, limit), limit)

    def get_session_info(self, session_id: str) -> SessionInfo | None:
        """Describe a session, or return None."""
        return self.manager.info(session_id)

    @property
    def access(self) -> AccessPolicy:
        """The tokens that are required."""
        return self._gate.access

    def reconfigure(self, **overrides: Unpack[ServerOverrides]) -> None:
        """Change options before the first session is opened, as the command line does.

        Raises:
            ConcurrencyConfigurationError: The class does not support so many sessions.
            RuntimeError: Sessions are open.
            ValueError: A value is invalid, or not allowed in this mode.
        """
        options = self.service.options.merged(overrides)
        options.recorded(self.service.mode)
        self.service.reconfigure(options)
        sessions, timeout_s = overrides.get("sessions"), overrides.get("session_timeout_s")
        changes = {"max_concurrent_envs": sessions, "session_timeout": timeout_s}
        self.concurrency_config = self.concurrency_config.model_copy(
            update={name: value for name, value in changes.items() if value is not None}
        )
        self._gate.use(options.access)

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Add the routes of a mode to an application, and the drain to its shutdown.

        Raises:
            ValueError: The mode is unknown, or it excludes an option.
        """
        self.service.mode = mode = parse_mode(mode)
        self.service.options.recorded(mode)  # raises if they exclude each other
        known = {id(route) for route in app.router.routes}
        if mode is ServerMode.SIMULATION:
            app.router.routes += gym_routes(self.service, self._gym_routes())
        self._mcp = McpEndpoint(self.service)
        add_info_routes(app, self.service, self._mcp)
        app.router.routes += self.monitoring.routes()
        app.router.routes.append(WebSocketRoute("/ws", WsEndpoint(self.service), name="ws"))
        if mode is ServerMode.PRODUCTION and may_serve_turns(self.manager.env_cls):
            app.router.routes.append(WebSocketRoute("/harness", HarnessEndpoint(self.service), name="harness"))
        TaskRoutes(self.service).register(app)
        # Last of all: guard our routes and the API documents, and leave the application's other routes alone.
        documents = Documents.paths(app)
        ours = [
            route for route in app.router.routes if id(route) not in known or getattr(route, "path", None) in documents
        ]
        Documents(app, lambda: self._gate.access, self._gate.guarded).install(ours)
        self._gate.enclose(ours, report=self.manager.report_error, documents=documents)
        self._add_lifespan(app)
        self.manager.listeners.append(self._warn_without_lifespan)
        atexit.register(_close_at_exit, weakref.ref(self.manager))

    def _gym_routes(self) -> GymRoutes:  # `openenv_core` has others
        return GymRoutes(self.service)

    def _add_lifespan(self, app: FastAPI) -> None:
        """Wrap the application's own lifespan: sessions are drained when it shuts down."""
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(application: Any) -> AsyncIterator[Any]:
            self._stop_warning()
            if self.service.options.record in ("page", "all") and not hasattr(application.state, "openenv_web"):
                raise ValueError(f"record={self.service.options.record!r} needs the web page, which shows the episodes")
            self.manager.resume()
            if not self.manager.peers.is_shared:
                self.manager.share(peers_of_process(self.manager.peers.boot))
            loop, options = asyncio.get_running_loop(), self.service.options
            loop_local(loop, UnreadReplies).limit = options.max_unread_bytes
            # One request of the largest size must pass, including the overhead of its chunks.
            partial = loop_local(loop, PartialRequests)
            partial.limit = max(options.max_unread_bytes, 2 * options.max_message_bytes)
            async with inner(application) as state:
                self.monitoring.begin()
                try:
                    with (
                        prepared_server(is_fast=options.fast),
                        FileWatch(loop).running(),
                        SessionDrain(self.manager, loop),
                    ):
                        yield state
                finally:
                    await self.manager.drain()

        app.router.lifespan_context = lifespan
        self._gate.on_slow_request = lambda receive: self._install_late(app, receive)

    def _install_late(self, app: FastAPI, receive: Receive) -> None:
        """Install the fast path at the first request if no lifespan has done it (`uvicorn --lifespan off`)."""
        self._gate.on_slow_request = None
        config = config_of_request(receive)
        if config is not None and self.service.options.fast and config.lifespan == "off" and serves(config, app):
            install(config)

    def _warn_without_lifespan(self, event: SessionEvent) -> None:
        """Warn at the first session if nothing will close the environments: a mount does not run our lifespan."""
        if event.name == "opened":
            self._stop_warning()  # warn only once
            logger.warning(
                "The lifespan of this application does not run, so a shutdown may not close its environments; an "
                "application that mounts it has to run it (docs/howto/serve.md)"
            )

    def _stop_warning(self) -> None:
        # Make a new list: a thread may be reading the old one.
        self.manager.listeners = [each for each in self.manager.listeners if each != self._warn_without_lifespan]

    def guard(self, routes: Iterable[BaseRoute]) -> None:
        """Put the gate in front of the web page's routes."""
        self._gate.enclose(routes, report=self.manager.report_error)

    def end_streams(self) -> None:
        """End open event streams; a server that shuts down would wait for them."""
        if self._mcp is not None:
            self._mcp.sessions.end_streams()
        for end in self.stream_enders:
            end()


class SessionDrain:
    """Delays SIGTERM until the sessions have ended, so that updating a server does not interrupt them.

        SIGTERM ──> no new sessions, `/ready` answers 503 ──> the last session ends, the time (`finish_s`) is over, or
                    SIGTERM comes again ──> the previous handler: the server shuts down

    Works under any server that handles SIGTERM in Python, such as uvicorn; its port stays open meanwhile.
    """

    def __init__(self, manager: SessionManager, loop: asyncio.AbstractEventLoop) -> None:
        self._manager = manager
        self._loop = loop
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._began: float | None = None
        self._waiting: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        if self._manager.limits.finish_s <= 0 or threading.current_thread() is not threading.main_thread():
            return
        if callable(before):  # without a handler, nothing would shut the server down in the end
            self._before = before
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def __exit__(self, *exc_info: object) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._before)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        assert self._before is not None
        now = time.monotonic()
        if self._began is None:
            self._began = now
            self._loop.call_soon_threadsafe(self._begin)
        elif now - self._began > _SAME_SIGNAL_S:  # under a supervisor it arrives twice: from it and to the whole group
            self._before(signum, frame)

    def _begin(self) -> None:
        self._manager.stop_admitting()
        self._waiting = self._loop.create_task(self._wait())

    async def _wait(self) -> None:
        assert self._before is not None
        limit_s = self._manager.limits.finish_s
        if not self._manager.is_empty:
            logger.info("SIGTERM: sessions have %g s to finish, new ones are refused", limit_s)
        deadline = self._loop.time() + limit_s
        while not self._manager.is_empty and self._loop.time() < deadline:  # noqa: ASYNC110 - a plain flag
            await asyncio.sleep(_LOOK_S)
        self._before(signal.SIGTERM, None)


@takes_server_arguments
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
    rollout_store: Path | str | None = None,
    **arguments: Unpack[ServerArguments],
) -> FastAPI:
    """Build the application of an environment.

    It has a web page at `/web` if `ENABLE_WEB_INTERFACE` is `true`, `1` or `yes`, and always under `openenv serve`.

    Args:
        env: The environment class, or a function without arguments that returns an environment.
        action_cls: The action model.
        observation_cls: The observation model.
        env_name: Name in the Task API and on the page.
        max_concurrent_envs: Sessions held at once; by default 1.
        concurrency_config: The same and a session timeout, as one object.
        gradio_builder: Builds a custom Gradio page, shown as a tab of the web page; needs the extra `gradio`.
        custom_tab_name: Label of the custom page's tab.
        custom_tab_primary: Whether that tab comes first.
        show_default_tab: Whether to show the standard page as well.
        title_override: Title of the page.
        state_cls: The state model; by default the environment's declaration.
        mode: `simulation` (default, or `OPENENV_MODE`) or `production`.
        reset_observation_cls: Model of the first observation, if it differs.
        rollout_store: The folder of the environment's rollouts; the page shows them in a tab.
        arguments: The options in `ServerArguments`; defaults come from the settings.
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
        **arguments,
    )
    page = PageArguments(
        gradio_builder,
        custom_tab_name,
        custom_tab_primary,
        show_default_tab,
        title_override,
        None if rollout_store is None else Path(rollout_store),
    )
    app.state.openenv_page_arguments = page  # for `openenv serve`, which has a page in any case
    if settings.web_interface_enabled():
        from .web.web_page import add_page  # servers without the page do not load it

        add_page(app, page)
    return app


@takes_server_arguments
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
    **arguments: Unpack[ServerArguments],
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
        **arguments,
    )
    app = new_application()
    app.state.openenv_server = server
    server.register_routes(app, settings.server_mode() if mode is None else mode)
    # Routes are tried in order, so put the most frequent ones first.
    app.router.routes.sort(key=lambda route: _HOT.get(getattr(route, "path", ""), len(_HOT)))
    return app


def new_application() -> FastAPI:
    """Return an empty application with the title, version and tags of an environment's API."""
    return FastAPI(title=_TITLE, version=_API_VERSION, description=_DESCRIPTION, openapi_tags=_TAGS)


def parse_mode(mode: ServerMode | str) -> ServerMode:
    """Read a mode's name in any case.

    Raises:
        ValueError: The mode is unknown.
    """
    try:
        return ServerMode(mode.lower() if isinstance(mode, str) and not isinstance(mode, ServerMode) else mode)
    except ValueError:
        raise ValueError(f"Invalid mode {mode!r}: choose 'simulation' or 'production'") from None


def _close_at_exit(manager: weakref.ref[SessionManager]) -> None:
    if (running := manager()) is not None:
        running.close_at_exit()


def _concurrency(options: ServerOptions, arguments: ServerArguments) -> ConcurrencyConfig:
    """Return the options as the published object, with None for an unset timeout."""
    limits = options.limits
    has_timeout = arguments.get("limits") is not None or settings.session_timeout() is not None
    return ConcurrencyConfig(
        max_concurrent_envs=limits.sessions, session_timeout=limits.idle_s if has_timeout else None
    )
