"""Running an application: uvicorn with uvloop, httptools and the fast WebSocket path.

Knows uvicorn's settings; must not know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from .. import settings
from ..errors import ConcurrencyConfigurationError
from ..runners import NotSendable
from ..sessions.manager import SessionManager
from .access import AccessPolicy
from .allocator import keep_freed_memory
from .app import PageWish
from .compat import HTTPEnvServer
from .door import Door
from .loading import TargetError, load_app, split_target
from .upgrade import UpgradeProtocol

logger = logging.getLogger("uvicorn.error")

# Sessions are many objects that live long: with Python's own 700, looking for garbage among them was an eighth of
# opening one.
_GARBAGE_THRESHOLD = 10_000
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Which tokens to ask for; None leaves what the application itself says.

    Args:
        token: May do everything.
        agent_token: May call tools.
        observer_token: May look.
        spare_token: An orchestrator's token for a server that would otherwise have none.
    """

    token: str | None = None
    agent_token: str | None = None
    observer_token: str | None = None
    spare_token: str | None = None

    def policy(self, own: AccessPolicy | None) -> AccessPolicy | None:
        """Return what an application is to ask for instead of its own; None leaves it as it is.

        Args:
            own: The application's own policy, if it can have one.

        Raises:
            ValueError: A token is none, or stands for two roles.
        """
        spare = self.spare_token
        if self.token is not None or self.agent_token is not None or self.observer_token is not None:
            return AccessPolicy(
                orchestrator=_listed(self.token) or settings.orchestrator_tokens() or _listed(spare),
                agent=_listed(self.agent_token) or settings.agent_tokens(),
                observer=_listed(self.observer_token) or settings.observer_tokens(),
            )
        lacks_any = own is not None and own.is_open
        return AccessPolicy(orchestrator=spare) if spare is not None and lacks_any else None


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; None leaves what the application itself says."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_sessions: int | None = None
    session_timeout_s: float | None = None
    runner: str | None = None
    log_level: str = "info"
    drain_s: int = 15
    max_message_mb: float | None = None
    access: AccessOptions = AccessOptions()
    log_format: str = "text"
    session_grace_s: float | None = None
    max_agent_sessions: int | None = None
    env_processes: int | None = None
    sessions_per_process: int | None = None
    web: bool = False


def prepare(target: str, options: ServeOptions) -> Any:
    """Load an application and apply what the command line says about sessions.

    Raises:
        TargetError: There is nothing to serve, or it does not take these options.
    """
    app = load_app(target)
    if options.web:
        _add_page(app, target)
    asked = (
        options.max_sessions,
        options.session_timeout_s,
        options.session_grace_s,
        options.max_agent_sessions,
        options.runner,
        options.env_processes,
        options.sessions_per_process,
        options.max_message_mb,
    )
    server = environment_server(app)
    try:
        policy = options.access.policy(None if server is None else server.access)
    except ValueError as exc:
        raise TargetError(str(exc)) from exc
    if policy is None and all(value is None for value in asked):
        return app
    if server is None:
        raise TargetError(
            f"{target} was not made by create_app, so sessions, the runner, tokens and limits cannot be set here"
        )
    megabytes = options.max_message_mb
    try:
        server.reconfigure(
            sessions=options.max_sessions,
            session_timeout_s=options.session_timeout_s,
            session_grace_s=options.session_grace_s,
            max_agent_sessions=options.max_agent_sessions,
            runner=options.runner,
            access=policy,
            max_message_bytes=None if megabytes is None else int(megabytes * 1024 * 1024),
            env_processes=options.env_processes,
            sessions_per_process=options.sessions_per_process,
        )
    except NotSendable as exc:
        raise TargetError(str(exc)) from exc
    except ConcurrencyConfigurationError as exc:
        name = exc.environment_name
        raise TargetError(
            f"--max-sessions {options.max_sessions} is too many for {name}, which does not say that its sessions share "
            f"nothing; if they do, set SUPPORTS_CONCURRENT_SESSIONS = True in {name}, else leave --max-sessions out"
        ) from exc
    return app


def _add_page(app: Any, target: str) -> None:
    """Give an environment's application its web page, unless it has one."""
    if environment_server(app) is None:
        return
    from ..web.attach import add_page  # servers without the page do not load it

    folder = Path(split_target(target)[0])
    wish = getattr(app.state, "openenv_page_wish", PageWish())
    add_page(app, wish, folder=folder.resolve() if folder.is_dir() else None)


def environment_server(app: Any) -> HTTPEnvServer | None:
    """Return the environment server behind an application, if there is one."""
    server = getattr(getattr(app, "state", None), "openenv_server", None)
    return server if isinstance(server, HTTPEnvServer) else None


class _Server(uvicorn.Server):
    """Calls back once the port is open."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        server = environment_server(self.config.app)
        if server is not None:
            server.end_streams()  # they would be waited for otherwise
            await self._finish_calls(server.manager)
        await super().shutdown(sockets=sockets)

    async def _finish_calls(self, manager: SessionManager) -> None:
        """Refuse new sessions and let running calls end while the port is still open, so that `/ready` can say so."""
        manager.stop_admitting()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if manager.is_quiet:
            return
        limit_s = self.config.timeout_graceful_shutdown or 0
        logger.info("Shutting down: running calls have %d s to end", limit_s)
        clock = asyncio.get_running_loop().time
        began = clock()
        while not (manager.is_quiet or self.force_exit or clock() - began > limit_s):  # noqa: ASYNC110 - a plain flag
            await asyncio.sleep(_LOOK_S)
        self.config.timeout_graceful_shutdown = max(1, round(limit_s - (clock() - began)))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            port = self.config.port
            for server in self.servers:
                port = server.sockets[0].getsockname()[1]
            self._on_started(port)


def uvicorn_settings(options: ServeOptions) -> dict[str, Any]:
    """The settings every way of serving shares."""
    return {
        "host": options.host,
        "port": options.port,
        "log_level": options.log_level,
        "http": Door,
        "ws": UpgradeProtocol,
        "timeout_graceful_shutdown": options.drain_s,
        "access_log": options.log_level in ("debug", "trace"),
    }


def log_config(options: ServeOptions) -> dict[str, Any]:
    """Uvicorn's logging, and ours beside it: an environment that fails must be seen where it is served."""
    level = options.log_level.upper()
    ours = {"handlers": ["default"], "level": level, "propagate": False}
    config = {**LOGGING_CONFIG, "loggers": {**LOGGING_CONFIG["loggers"], "openenv": ours}}
    if options.log_format == "json":
        # Everybody's lines, an environment's own included: whoever reads them expects JSON and nothing else.
        as_json = {"()": "openenv.telemetry.logs.JsonFormatter"}
        config["formatters"] = {"default": as_json, "access": as_json}
        config["root"] = {"handlers": ["default"], "level": level}
    return config


def _mark_logs(app: Any, options: ServeOptions) -> None:
    """Have structured logs name the session and the request that they are about."""
    server = environment_server(app)
    if options.log_format == "json" and server is not None:
        server.monitoring.watch.name_calls()


def serve(target: str, options: ServeOptions, on_started: Callable[[Any, int], None]) -> None:
    """Serve until interrupted.

    Args:
        target: What to serve.
        options: How.
        on_started: Called with the application and its port once that is open.

    Raises:
        TargetError: There is nothing to serve, or the port is taken.
    """
    check_port(options)
    run_app(prepare(target, options), options, on_started)


def run_app(
    app: Any,
    options: ServeOptions,
    on_started: Callable[[Any, int], None],
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve an application until interrupted.

    Args:
        app: The application.
        options: How.
        on_started: Called with the application and its port once that is open.
        sockets: Where to listen instead of the address in the options.
    """
    keep_freed_memory()
    _mark_logs(app, options)
    gc.freeze()  # what is loaded now stays; the collector need not look at it again
    gc.set_threshold(_GARBAGE_THRESHOLD, *gc.get_threshold()[1:])
    gc.enable()
    config = uvicorn.Config(app, log_config=log_config(options), **uvicorn_settings(options))
    with _ended_well_by_sigterm():
        _Server(config, lambda port: on_started(app, port)).run(sockets)


@contextlib.contextmanager
def _ended_well_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process with 0: uvicorn raises it once more after a shutdown that went as it should."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _listed(tokens: str | None) -> list[str]:
    return [] if tokens is None else [token.strip() for token in tokens.split(",")]


def check_port(options: ServeOptions) -> None:
    """Find out early, and in one line, that a port cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as exc:
            foreign = isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL
            advice = "give an address of this machine as --host" if foreign else "choose another --port, or 0 for any"
            raise TargetError(f"cannot listen on {options.host}:{options.port} ({exc.strerror}); {advice}") from exc
