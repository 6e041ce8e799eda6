"""Runs an application under uvicorn: `openenv serve` with and without `--reload`, and the drain at shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import multiprocessing.connection
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.config import LOG_LEVELS, LOGGING_CONFIG
from uvicorn.supervisors import ChangeReload

from openenv import settings
from openenv.env.binding import factory_name
from openenv.env.manifest import MANIFEST
from openenv.errors import ConcurrencyConfigurationError, EnvironmentFactoryError, message_of
from openenv.protocol.json_values import encode

from .access import AccessPolicy
from .app import HTTPEnvServer, PageArguments
from .asgi import Receive, Scope, Send, respond
from .fast.http import FirstRead, LimitedHttpProtocol
from .fast.upgrade import UpgradeProtocol
from .loading import TargetError, TargetFailed, load_app, split_target
from .options import DEFAULT_MAX_MESSAGE_BYTES, ServerOptions, ServerOverrides
from .process_tuning import keep_freed_memory, tune_garbage_collection
from .runners import NotSendable
from .sessions.manager import SessionManager

logger = logging.getLogger("uvicorn.error")

_LOOK_S = 0.05
SAME_SIGNAL_S = 0.5
UNCLOSED_EXIT: Final = 3
"""The exit status of a server that could not close every environment."""


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """The tokens to require; None keeps the application's tokens.

    Args:
        token: May do everything.
        agent_token: May call tools.
        observer_token: May read.
        spare_token: An orchestrator's token for a server that would otherwise have no tokens.
    """

    token: str | None = None
    agent_token: str | None = None
    observer_token: str | None = None
    spare_token: str | None = None

    def values(self) -> list[str]:
        """Return all tokens, for logs that must not contain them."""
        return [
            each
            for tokens in (self.token, self.agent_token, self.observer_token, self.spare_token)
            for each in _listed(tokens)
        ]

    def policy(self, own: AccessPolicy | None) -> AccessPolicy | None:
        """Return the policy that replaces the application's policy, or None to keep it.

        Args:
            own: The application's policy, if it can have one.

        Raises:
            ValueError: A token is invalid, or has two roles.
        """
        spare = self.spare_token
        if self.token is not None or self.agent_token is not None or self.observer_token is not None:
            return AccessPolicy(
                orchestrator=_listed(self.token) or settings.orchestrator_tokens() or _listed(spare),
                agent=_listed(self.agent_token) or settings.agent_tokens(),
                observer=_listed(self.observer_token) or settings.observer_tokens(),
            )
        is_open = own is not None and own.is_open
        return AccessPolicy(orchestrator=spare) if spare is not None and is_open else None


@dataclass(frozen=True, slots=True)
class HeartbeatOptions:
    """When a server with several workers gives up on one whose event loop has stopped.

    Args:
        timeout_s: A worker that is silent for so long gets no new sessions.
        replace_s: A worker that is silent for so long is killed and replaced; 0 for never.

    Raises:
        ValueError: The timeout is not positive, or a worker would be replaced before it counts as hung.
    """

    timeout_s: float = 2.5
    replace_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"the heartbeat timeout must be a number of seconds above 0, not {self.timeout_s!r}")
        if self.replace_s and not self.timeout_s <= self.replace_s < math.inf:
            raise ValueError(
                f"the replace timeout must be 0 or at least the heartbeat timeout ({self.timeout_s:g} s), "
                f"not {self.replace_s!r}"
            )


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to run an application.

    Args:
        server: Options that replace the application's.
        web: Whether to add a web page to an application without one.
        workers: The number of processes that share the sessions.
        pin_workers: Whether each process stays on one core.
        heartbeat: When a process counts as hung.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    log_format: str = "text"
    drain_s: int = 15
    web: bool = False
    workers: int = 1
    pin_workers: bool = False
    heartbeat: HeartbeatOptions = HeartbeatOptions()
    access: AccessOptions = AccessOptions()
    server: ServerOverrides = field(default_factory=ServerOverrides)


def prepare(target: str, options: ServeOptions) -> Any:
    """Load an application and apply the options of the command line.

    Raises:
        TargetError: The target cannot be served, or not with these options.
    """
    app = load_app(target)
    if options.web:
        _add_page(app, target)
    server = environment_server(app)
    try:
        policy = options.access.policy(None if server is None else server.access)
    except ValueError as exc:
        raise TargetError(str(exc)) from exc
    overrides: ServerOverrides = {**options.server, "access": policy}
    if all(value is None for value in overrides.values()):
        return app
    if server is None:
        raise TargetError(
            f"{target} was not made by create_app, so sessions, the runner, tokens and limits cannot be set here"
        )
    try:
        server.reconfigure(**overrides)
    except NotSendable as exc:
        raise TargetError(str(exc)) from exc
    except ConcurrencyConfigurationError as exc:
        name, count = exc.environment_name, overrides.get("sessions")
        raise TargetError(
            f"--max-sessions {count} is too many for {name}, which does not say that its sessions share "
            f"nothing; if they do, set SUPPORTS_CONCURRENT_SESSIONS = True in {name}, else leave --max-sessions out"
        ) from exc
    return app


def _add_page(app: Any, target: str) -> None:
    """Give an environment's application its web page, unless it has one."""
    if environment_server(app) is None:
        return
    from .web.web_page import add_page  # servers without the page do not load it

    folder = Path(split_target(target)[0])
    page = getattr(app.state, "openenv_page_arguments", PageArguments())
    add_page(app, page, folder=folder.resolve() if folder.is_dir() else None)


def environment_server(app: Any) -> HTTPEnvServer | None:
    """Return the environment server behind an application, if there is one."""
    server = getattr(getattr(app, "state", None), "openenv_server", None)
    return server if isinstance(server, HTTPEnvServer) else None


class EnvironmentServer(uvicorn.Server):
    """Calls back once the port is open, and closes every environment before it ends."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[int], None]) -> None:
        super().__init__(config)
        self.failure: TargetFailed | None = None
        self._on_started = on_started
        self._signalled_at = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down. After a second signal, wait briefly for environments to close and for nothing else."""
        now = time.monotonic()
        if self.should_exit and sig == signal.SIGTERM and now - self._signalled_at < SAME_SIGNAL_S:
            return  # under --reload it arrives twice: from the reloader and to the whole group
        self._signalled_at = now
        if self.should_exit:
            self.force_exit = True  # uvicorn does this for SIGINT only
            server = environment_server(self.config.app)
            if server is not None:
                server.manager.hurry()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        server = environment_server(self.config.app)
        if server is not None:
            server.end_streams()  # they would be waited for otherwise
            await self._finish_calls(server.manager)
        await super().shutdown(sockets=sockets)
        if server is not None and self.force_exit:  # then uvicorn skips the lifespan, which drains
            await server.manager.drain()

    async def _finish_calls(self, manager: SessionManager) -> None:
        """Refuse new sessions and let running calls end. The port stays open, so that `/ready` reports the drain."""
        manager.stop_admitting()
        for connection in list(self.server_state.connections):
            # A first request may be on its way, such as a probe of `/ready`. The port is still open, so answer it.
            if getattr(connection, "is_new", False):
                continue
            # uvicorn's own WebSockets (`OPENENV_FAST=0`) raise when `super().shutdown` shuts them down once more.
            if not type(connection).__module__.startswith("uvicorn.protocols.websockets"):
                connection.shutdown()
        if self._is_quiet(manager):
            return
        limit_s = self.config.timeout_graceful_shutdown or 0
        logger.info("Shutting down: running calls have %d s to end", limit_s)
        clock = asyncio.get_running_loop().time
        began = clock()
        while not (self._is_quiet(manager) or self.force_exit or clock() - began > limit_s):  # noqa: ASYNC110 - a plain flag
            await asyncio.sleep(_LOOK_S)
        self.config.timeout_graceful_shutdown = max(1, round(limit_s - (clock() - began)))

    def _is_quiet(self, manager: SessionManager) -> bool:
        """Return whether no call has to end before the port is closed."""
        return manager.is_quiet

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and await self._can_build():
            port = self.config.port
            for server in self.servers:
                port = server.sockets[0].getsockname()[1]
            self._on_started(port)

    async def _can_build(self) -> bool:
        """Build one environment and close it, to report a broken constructor now and not to the first client.

        This runs after the application's lifespan has started, because the constructor may depend on it.
        """
        server = environment_server(self.config.app)
        if server is None:
            return True
        try:
            await server.service.metadata()
        except EnvironmentFactoryError as exc:
            name = factory_name(server.service.factory)
            self.failure = TargetFailed(name, exc.__cause__ or exc, "cannot be built", is_logged=True)
            self.should_exit = True
        except Exception:  # the metadata failed, or all slots are in use: the constructor works
            logger.warning("The environment could not be asked for its metadata", exc_info=True)
        return self.failure is None


def uvicorn_settings(options: ServeOptions, server: ServerOptions | None = None) -> dict[str, Any]:
    """Return the settings that every way of serving shares.

    Args:
        options: The options of the process.
        server: The options of the environment's server, if the application has one.
    """
    common = {
        "host": options.host,
        "port": options.port,
        "log_level": options.log_level,
        "timeout_graceful_shutdown": options.drain_s,
        "access_log": options.log_level in ("debug", "trace"),
    }
    if settings.fast_enabled() if server is None else server.fast:
        return {**common, "http": FirstRead, "ws": UpgradeProtocol}
    limit = DEFAULT_MAX_MESSAGE_BYTES if server is None else server.max_message_bytes
    # Uvicorn closes a connection over its limit. The endpoint answers messages up to twice ours and keeps the session.
    return {**common, "http": LimitedHttpProtocol, "ws_max_size": 2 * limit, "ws_per_message_deflate": False}


def log_config(options: ServeOptions) -> dict[str, Any]:
    """Return uvicorn's logging configuration plus ours, so that failures of environments appear in the server's log."""
    level = LOG_LEVELS[options.log_level]  # a number: only `uvicorn.Config` adds the name TRACE to logging
    ours = {"handlers": ["default"], "level": level, "propagate": False}
    config = {**LOGGING_CONFIG, "loggers": {**LOGGING_CONFIG["loggers"], "openenv": ours}}
    values = (*options.access.values(), *settings.secret_values())
    config["filters"] = {"secrets": {"()": "openenv.protocol.redaction.RedactSecrets", "values": values}}
    config["handlers"] = {
        name: {**handler, "filters": ["secrets"]} for name, handler in LOGGING_CONFIG["handlers"].items()
    }
    if options.log_format == "json":
        # Format all lines, including the environment's: the reader is a program that expects only JSON.
        as_json = {"()": "openenv.server.telemetry.logs.JsonFormatter"}
        config["formatters"] = {"default": as_json, "access": as_json}
        config["root"] = {"handlers": ["default"], "level": level}
    return config


def mark_logs(app: Any, options: ServeOptions) -> None:
    """Add the session and the request to each line of structured logs."""
    server = environment_server(app)
    if options.log_format == "json" and server is not None:
        server.monitoring.watch.name_calls()


def serve(target: str, options: ServeOptions, on_started: Callable[[Any, int], None]) -> None:
    """Serve until interrupted.

    Args:
        target: The environment or application.
        options: The options.
        on_started: Called with the application and its port once the port is open.

    Raises:
        TargetError: The target cannot be served, or the port is in use.
    """
    check_port(options)
    if options.workers > 1:
        from .workers.supervisor import serve_workers  # a server with one process does not load it

        serve_workers(target, options, on_started)
    else:
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
        options: The options.
        on_started: Called with the application and its port once the port is open.
        sockets: Listening sockets; they replace the address in the options.

    Raises:
        TargetFailed: The environment cannot be built.
        SystemExit: Some environment could not be closed; the log names its session.
    """
    keep_freed_memory()
    mark_logs(app, options)
    tune_garbage_collection()
    server = environment_server(app)
    uses = uvicorn_settings(options, None if server is None else server.service.options)
    config = uvicorn.Config(app, log_config=log_config(options), **uses)
    try:
        with _ended_well_by_sigterm():
            running = EnvironmentServer(config, lambda port: on_started(app, port))
            running.run(sockets)
        if running.failure is not None:
            raise running.failure
    finally:
        if server is not None:
            check_closed(server.manager)


def check_closed(manager: SessionManager) -> None:
    """End the process with `UNCLOSED_EXIT` if the shutdown could not close every environment."""
    if manager.unclosed:
        names = ", ".join(manager.unclosed)
        logger.error("Shut down without closing %d environment(s), of the sessions %s", len(manager.unclosed), names)
        sys.exit(UNCLOSED_EXIT)


@contextlib.contextmanager
def _ended_well_by_sigterm() -> Iterator[None]:
    """Exit with 0 on SIGTERM: uvicorn raises it once more after an orderly shutdown."""
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
    """Fail early, with a one-line message, if the port is not available."""
    bound_socket(options.host, options.port).close()


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a port without listening.

    Raises:
        TargetError: The port is not available; the text says what to do.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        foreign = isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL
        advice = "give an address of this machine as --host" if foreign else "choose another --port, or 0 for any"
        raise TargetError(f"cannot listen on {host}:{port} ({exc.strerror}); {advice}") from exc
    return sock


# -- `openenv serve --reload` -----------------------------------------------------------------------------------------
# One process watches the sources; another one serves them and is restarted after a change. While the sources cannot be
# loaded, every request gets 503 with the reason.

NOT_LOADED = "NOT_LOADED"
_REPORT_LINES = 15
_POLL_S = 0.1
_REAP_S = 10.0


def serve_reloading(target: str, options: ServeOptions, on_started: Callable[[Any, int], None]) -> None:
    """Serve until interrupted, and restart when a source file changes.

    Args:
        target: The environment or application.
        options: The options.
        on_started: Called with the application and its port after each start. It is pickled for the serving process.

    Raises:
        TargetError: The target cannot be served, or the port is in use.
    """
    check_port(options)
    gc.enable()
    server = environment_server(prepare(target, options))  # report mistakes now and not at each reload
    shows_reason = server is None or server.access.is_open
    config = uvicorn.Config(
        "",  # the serving process loads the application itself
        reload=True,
        reload_dirs=_watched(target),
        reload_includes=[MANIFEST],
        log_config=log_config(options),
        **uvicorn_settings(options),
    )
    serving = _Serving(target, options, on_started, shows_reason)
    reloader = _Reloader(config, target=serving, sockets=[config.bind_socket()])
    reloader.run()
    if reloader.was_interrupted:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class _Serving:
    """The target function of the serving process; `shows_reason` is false if clients need a token to read errors."""

    target: str
    options: ServeOptions
    on_started: Callable[[Any, int], None]
    shows_reason: bool

    def __call__(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            app = prepare(self.target, self.options)
        except Exception as exc:
            reason = message_of(exc)
            report = _last_lines(exc.report()) if isinstance(exc, TargetFailed) else ""
            logger.error("%s%s", report, _waiting(reason))
            stub = Unloadable(reason if self.shows_reason else None)
            run_app(stub, self.options, lambda app, port: None, sockets)  # without an application, print no banner
        else:
            try:
                run_app(app, self.options, self.on_started, sockets)
            except TargetFailed as exc:
                logger.error("%s%s", _last_lines(exc.report()), message_of(exc))
                sys.exit(1)  # the reloader answers until the next change


class Unloadable:
    """Stands in for an application that cannot be loaded, and answers 503.

    Args:
        reason: The error text for clients; None hides it, because clients need a token.
    """

    def __init__(self, reason: str | None) -> None:
        text = "The environment cannot be loaded; the server's log says why" if reason is None else reason
        self._body = encode({"detail": text, "code": NOT_LOADED})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 503."""
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await respond(send, 503, self._body)
        else:
            await receive()  # websocket.connect
            headers = [(b"content-type", b"application/json")]
            await send({"type": "websocket.http.response.start", "status": 503, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": self._body})


class _Reloader(ChangeReload):  # type: ignore[misc,valid-type]  # uvicorn picks the class when it is imported
    """Starts the serving process. If the process dies, clients get 503 until the next start."""

    was_interrupted = False

    def signal_handler(self, sig: int, frame: FrameType | None) -> None:
        self.was_interrupted = self.was_interrupted or sig == signal.SIGINT
        super().signal_handler(sig, frame)

    def startup(self) -> None:
        super().startup()
        self._watch()

    def restart(self) -> None:
        self._stop_watching()
        super().restart()
        self._watch()

    def shutdown(self) -> None:
        self._stop_watching()
        super().shutdown()

    def _watch(self) -> None:
        self._expected = threading.Event()
        arguments = (self.process, self.sockets[0], self._expected)
        self._watcher = threading.Thread(target=_answer_after, args=arguments, daemon=True)
        self._watcher.start()

    def _stop_watching(self) -> None:
        """Expect the end of the process, and leave the port to the next one."""
        self._expected.set()
        if not self.process.is_alive():
            self._watcher.join()


def _answer_after(process: BaseProcess, listening: socket.socket, expected: threading.Event) -> None:
    """Wait for the end of a process; if it was not expected, answer in its place until the next start."""
    multiprocessing.connection.wait([process.sentinel])
    if expected.is_set():
        return
    process.join(_REAP_S)  # the exit code is available a moment later
    reason = f"the process that serves has ended with exit code {process.exitcode}"
    logger.error("%s", _waiting(reason))
    body = encode({"detail": f"The server is down: {reason}", "code": NOT_LOADED})
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    while not expected.is_set():
        try:
            if select.select([listening], [], [], _POLL_S)[0]:
                _answer(listening, f"{head}connection: close\r\n\r\n".encode() + body)
        except OSError:  # the process died before it listened: clients are refused anyway
            expected.wait(_POLL_S)


def _answer(listening: socket.socket, reply: bytes) -> None:
    try:
        peer, _ = listening.accept()
    except BlockingIOError:
        return
    with peer, contextlib.suppress(OSError):
        peer.settimeout(_POLL_S)
        peer.recv(65_536)  # closing with unread bytes would reset the connection and lose the answer
        peer.sendall(reply)


def _waiting(reason: str) -> str:
    return f"{reason}\nClients are answered with 503 now; the next change of a source file starts it again."


def _last_lines(report: str) -> str:
    lines = report.splitlines(keepends=True)
    return "".join(["...\n", *lines[-_REPORT_LINES:]] if len(lines) > _REPORT_LINES else lines)


def _watched(target: str) -> list[str]:
    """Return the folders with the user's files: the working folder, and the folder of the target."""
    place = Path(split_target(target)[0])
    if place.is_file():
        place = place.parent
    folder = place if place.is_dir() else Path()
    return sorted({str(Path.cwd()), str(folder.resolve())})
