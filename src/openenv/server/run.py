"""Running an application: uvicorn with uvloop, httptools and the fast WebSocket path.

Knows uvicorn's settings; must not know what is served.
"""

from __future__ import annotations

import contextlib
import errno
import gc
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
from .allocator import keep_freed_memory
from .compat import HTTPEnvServer
from .door import Door
from .loading import TargetError, load_app, split_target
from .upgrade import UpgradeProtocol

# Sessions are many objects that live long: with Python's own 700, looking for garbage among them was an eighth of
# opening one.
_GARBAGE_THRESHOLD = 10_000


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; None leaves what the application itself says."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_sessions: int | None = None
    session_timeout_s: float | None = None
    runner: str | None = None
    reload: bool = False
    log_level: str = "info"
    drain_s: int = 15


def prepare(target: str, options: ServeOptions) -> Any:
    """Load an application and apply what the command line says about sessions.

    Raises:
        TargetError: There is nothing to serve, or it does not take these options.
    """
    app = load_app(target)
    asked = (options.max_sessions, options.session_timeout_s, options.runner)
    if any(value is not None for value in asked):
        server = environment_server(app)
        if server is None:
            raise TargetError(
                f"{target} was not made by create_app, so sessions, their timeout and the runner cannot be set here"
            )
        server.reconfigure(
            sessions=options.max_sessions, session_timeout_s=options.session_timeout_s, runner=options.runner
        )
    return app


def environment_server(app: Any) -> HTTPEnvServer | None:
    """Return the environment server behind an application, if there is one."""
    server = getattr(getattr(app, "state", None), "openenv_server", None)
    return server if isinstance(server, HTTPEnvServer) else None


def app_from_environment() -> Any:
    """Load the application in a process that `--reload` has started."""
    target = settings.serve_target()
    if target is None:
        raise TargetError("OPENENV_SERVE_TARGET is not set")
    return prepare(
        target,
        ServeOptions(
            max_sessions=settings.max_sessions(),
            session_timeout_s=settings.session_timeout(),
            runner=settings.runner_name(),
        ),
    )


class _Server(uvicorn.Server):
    """Calls back once the port is open."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        server = environment_server(self.config.app)
        if server is not None:
            server.end_streams()  # they would be waited for otherwise
        await super().shutdown(sockets=sockets)

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
    ours = {"handlers": ["default"], "level": options.log_level.upper()}
    return {**LOGGING_CONFIG, "loggers": {**LOGGING_CONFIG["loggers"], "openenv": ours}}


def serve(target: str, options: ServeOptions, on_started: Callable[[Any, int], None]) -> None:
    """Serve until interrupted. `on_started(app, port)` is called once the port is open.

    Raises:
        TargetError: There is nothing to serve, or the port is taken.
    """
    _check_port(options)
    if options.reload:
        gc.enable()
        _serve_reloading(target, options)
        return
    keep_freed_memory()
    app = prepare(target, options)
    gc.freeze()  # what is loaded now stays; the collector need not look at it again
    gc.set_threshold(_GARBAGE_THRESHOLD, *gc.get_threshold()[1:])
    gc.enable()
    config = uvicorn.Config(app, log_config=log_config(options), **uvicorn_settings(options))
    with _ended_well_by_sigterm():
        _Server(config, lambda port: on_started(app, port)).run()


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


def _serve_reloading(target: str, options: ServeOptions) -> None:
    load_app(target)  # a mistake in the target is told now and not by every reload
    settings.export(
        {
            "OPENENV_SERVE_TARGET": target,
            "OPENENV_MAX_SESSIONS": options.max_sessions,
            "OPENENV_SESSION_TIMEOUT": options.session_timeout_s,
            "OPENENV_RUNNER": options.runner,
        }
    )
    uvicorn.run(
        f"{__name__}:app_from_environment",
        factory=True,
        reload=True,
        reload_dirs=_watched(target),
        log_config=log_config(options),
        **uvicorn_settings(options),
    )


def _watched(target: str) -> list[str]:
    """The folders whose files are the user's: the working folder, and the target's own."""
    place = Path(split_target(target)[0])
    own = place if place.is_dir() else place.parent if place.is_file() else Path()
    return sorted({str(Path.cwd()), str(own.resolve())})


def _check_port(options: ServeOptions) -> None:
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
