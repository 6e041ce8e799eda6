"""`openenv serve`: the options, the banner and a quick start; `openenv.server` loads and runs the application."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from openenv import settings
from openenv.protocol.addresses import is_loopback

from .command import check_choice, target_failures

if TYPE_CHECKING:
    from openenv.server.app import HTTPEnvServer

_OptionT = TypeVar("_OptionT")
_of_sessions = partial(typer.Option, None, rich_help_panel="Sessions")
_of_episodes = partial(typer.Option, None, rich_help_panel="Episodes")
_of_access = partial(typer.Option, rich_help_panel="Access")
_of_logs = partial(typer.Option, rich_help_panel="Logs")


def serve(
    target: str = typer.Argument(".", metavar="TARGET", help="What to serve: a folder, a file or a module."),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on."),
    port: int | None = typer.Option(
        None,
        "--port",
        "-p",
        metavar="PORT",
        min=0,
        max=65535,
        help="Port; 0 takes any free one. By default what openenv.yaml says, else 8000.",
    ),
    workers: str | None = typer.Option(
        None,
        metavar="N",
        help="Server processes that share the port and all limits; auto is one per core. By default 1.",
    ),
    pin_workers: bool = typer.Option(
        False, "--pin-workers", help="Keep each worker on a core of its own; for environments without own threads."
    ),
    reload: bool = typer.Option(False, "--reload", help="Restart when a source file changes."),
    web: bool | None = typer.Option(
        None, "--web/--no-web", help="Whether there is a web page at /web; by default there is."
    ),
    max_message_mb: float | None = typer.Option(
        None,
        metavar="MB",
        min=0.001,
        help="The largest request that is accepted; by default 100, or what the application says.",
    ),
    max_batch: int | None = typer.Option(
        None,
        metavar="N",
        min=1,
        help="How many requests one batch of a vector client may hold; by default 10000, or what the application says.",
    ),
    max_unread_mb: float | None = typer.Option(
        None,
        metavar="MB",
        min=0.001,
        help="How much all clients together may leave unread; beyond that, those that read least are disconnected. By "
        "default 1024, or what the application says.",
    ),
    max_sessions: int | None = _of_sessions(
        metavar="N",
        min=1,
        help="Sessions held at once; by default what the application says. A bare class gets 256, or 1 if its "
        "instances share something.",
    ),
    runner: str | None = _of_sessions(
        metavar="NAME",
        help="Where environment code runs: thread, inline (on the event loop, for steps of microseconds), process "
        "(in worker processes, for code that needs all cores or may crash), or auto, which is thread.",
    ),
    env_processes: int | None = _of_sessions(
        metavar="N",
        min=1,
        help="With --runner process: how many processes share the sessions; by default one per core.",
    ),
    sessions_per_process: int | None = _of_sessions(
        metavar="N", min=1, help="With --runner process: how many sessions one process may hold; by default any number."
    ),
    session_timeout: float | None = _of_sessions(
        metavar="SECONDS", min=0.001, help="How long an unused HTTP session is kept; by default 900."
    ),
    grace: float | None = _of_sessions(
        metavar="SECONDS",
        min=0.0,
        help="How long a session waits for a client whose connection broke; by default 60. 0: it ends at once.",
    ),
    close_timeout: float | None = _of_sessions(
        metavar="SECONDS",
        min=0.001,
        help="How long the close of an environment may take before its slot is given to others; by default 30.",
    ),
    drain_timeout: float | None = _of_sessions(
        metavar="SECONDS",
        min=0.0,
        help="How long sessions may go on after SIGTERM, while new ones are refused; by default 0: only running calls "
        "end.",
    ),
    max_agent_sessions: int | None = _of_sessions(
        metavar="N", min=0, help="How many of the sessions agents may open; by default all but one."
    ),
    record: str | None = _of_episodes(
        metavar="WHOSE",
        help="Whose episodes are kept on disk, for the Episodes tab and openenv replay: page (those played on the web "
        "page, the default), all, or off.",
    ),
    record_dir: Path | None = _of_episodes(
        metavar="FOLDER",
        help="Where; by default OPENENV_EPISODES, else a folder of the environment in your data folder.",
    ),
    record_episodes: int | None = _of_episodes(metavar="N", min=1, help="How many are kept; by default 1000."),
    record_mb: float | None = _of_episodes(
        metavar="MB", min=0.001, help="How much disk they may take; by default 256. The oldest are deleted."
    ),
    token: str | None = _of_access(
        None,
        metavar="TOKEN",
        help="Ask clients for this token. Better set OPENENV_TOKEN, which others on this machine cannot see.",
    ),
    agent_token: str | None = _of_access(
        None, metavar="TOKEN", help="A second token, for agents: it may call tools and nothing else."
    ),
    observer_token: str | None = _of_access(
        None, metavar="TOKEN", help="A third token, for observers: it may read and change nothing."
    ),
    no_token: bool = _of_access(
        False, "--no-token", help="Never make a token, not even on an address that others can reach."
    ),
    log_level: str = _of_logs("info", metavar="LEVEL", help="critical, error, warning, info, debug or trace."),
    log_format: str | None = _of_logs(
        None, metavar="FORMAT", help="text, or json: one object per line, with session and request."
    ),
) -> None:
    """Serve an environment over WebSocket, HTTP and MCP, on one port. A web page to play it by hand is at /web.

    TARGET is one of these, by default the folder you are in:

      a folder                          openenv serve envs/gridworld_env
      a Python file                     openenv serve my_env.py
      a class or an app in a file       openenv serve my_env.py:MyEnvironment
      a module                          openenv serve my_package.server.app:app
      a Gymnasium environment           openenv serve gymnasium:CartPole-v1

    A folder is served as uvicorn server.app:app inside it would be: its openenv.yaml names another application, and
    the folder becomes the working folder. A class needs nothing else: its models are read from its annotations.
    While you write one:

      openenv serve my_env.py --reload --log-level debug

    With all cores of the machine, for many sessions:

      openenv serve my_env.py --workers auto

    For other machines, with a token that is made and printed:

      openenv serve my_env.py --host 0.0.0.0
    """
    gc.disable()  # nothing is garbage while everything loads; `run` turns it on again
    import_fastapi()
    from openenv.server.loading import enter_folder, manifest_settings  # servers load only for this command
    from openenv.server.options import ServerOverrides, in_bytes
    from openenv.server.run import AccessOptions, ServeOptions, serve_reloading
    from openenv.server.run import serve as run

    with target_failures():
        declared = manifest_settings(target)
        record_dir = None if record_dir is None else record_dir.resolve()
        target = enter_folder(target)
    for note in declared.notes:
        typer.secho(f"Note: {note}", fg="yellow", err=True)
    port = declared.port if port is None else port
    runner = _unless_set(runner, settings.runner_name, declared.runner)
    workers = _unless_set(workers, settings.workers, declared.workers)
    max_sessions = _unless_set(max_sessions, settings.max_sessions, declared.max_sessions)
    session_timeout = _unless_set(session_timeout, settings.session_timeout, declared.session_timeout)
    check_choice("--runner", runner, ("auto", "thread", "inline", "process"))
    if (env_processes or sessions_per_process) and (runner or settings.runner_name()) != "process":
        raise typer.BadParameter("these need --runner process", param_hint="--env-processes, --sessions-per-process")
    log_format = log_format or settings.log_format() or "text"
    check_choice("--log-format", log_format, ("text", "json"))
    check_choice("--log-level", log_level, ("critical", "error", "warning", "info", "debug", "trace"))
    check_choice("--record", record, ("page", "all", "off"))
    if web is False and record in ("page", "all"):
        raise typer.BadParameter("recorded episodes are shown on the web page", param_hint="--record, --no-web")
    count = _worker_count(workers)
    if reload and count > 1:
        raise typer.BadParameter("--reload serves with one process", param_hint="--workers")
    _check_pinning(count, runner or settings.runner_name(), is_wanted=pin_workers)
    if no_token and (token or agent_token or observer_token):
        raise typer.BadParameter("this contradicts the tokens that are given", param_hint="--no-token")
    needs_token = not no_token and (not is_loopback(host) or agent_token is not None or observer_token is not None)
    spare = secrets.token_urlsafe(24) if needs_token and token is None else None
    overrides: ServerOverrides = {
        "sessions": max_sessions,
        "session_timeout_s": session_timeout,
        "session_grace_s": grace,
        "close_timeout_s": close_timeout,
        "drain_timeout_s": drain_timeout,
        "max_agent_sessions": max_agent_sessions,
        "runner": runner,
        "env_processes": env_processes,
        "sessions_per_process": sessions_per_process,
        "max_message_bytes": in_bytes(max_message_mb),
        "max_batch": max_batch,
        "max_unread_bytes": in_bytes(max_unread_mb),
        "record": record,
        "record_dir": record_dir,
        "record_episodes": record_episodes,
        "record_bytes": in_bytes(record_mb),
    }
    options = ServeOptions(
        host,
        port,
        log_level,
        log_format,
        web=_has_page(web),
        workers=count,
        pin_workers=pin_workers,
        access=AccessOptions(token, agent_token, observer_token, spare),
        server=overrides,
    )
    introduction = Introduction(target, host, port, spare, log_level, log_format, watches=reload, workers=count)
    try:
        with target_failures():
            (serve_reloading if reload else run)(target, options, introduction)
    finally:
        gc.enable()


@dataclass(frozen=True)
class Introduction:
    """Announces on the terminal that the server is up: a banner, or in quiet modes only the address and the token."""

    target: str
    host: str
    port: int
    spare: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    watches: bool = False
    workers: int = 1

    def __call__(self, app: Any, actual: int) -> None:
        """Announce an application and its actual port, from its running server."""
        _leave_on_second_interrupt(app)
        self.announce(app, actual)

    def announce(self, app: Any, actual: int) -> None:
        """Print what a user needs: addresses, token, a quick start."""
        from openenv.server.access import Role
        from openenv.server.run import environment_server

        server = environment_server(app)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # programs on this machine use it
        place = f"[{host}]:{actual}" if ":" in host else f"{host}:{actual}"
        accepted = self.spare is not None and server is not None and server.access.role(self.spare) is Role.ORCHESTRATOR
        token = self.spare if accepted else None
        is_silent = self.log_level in ("critical", "error", "warning")
        if not is_silent and self.log_format != "json":
            self._show_banner(app, server, place, token)
            return
        if self.port == 0 and is_silent:
            typer.echo(f"http://{place}", err=True)
        if token is not None:
            typer.echo(f"token: {token}", err=True)

    def _show_banner(self, app: Any, server: HTTPEnvServer | None, place: str, token: str | None) -> None:
        from rich.console import Console  # a server that starts quietly need not load it
        from rich.markup import escape
        from rich.panel import Panel
        from rich.table import Table

        from openenv.types import ServerMode

        is_open = server is None or server.access.is_open
        has_page = any(getattr(route, "path", None) == "/web" for route in getattr(app, "routes", ()))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(no_wrap=True)
        if server is not None and has_page:
            table.add_row("Web page", f"[bold]http://{place}/web[/]")
        table.add_row("WebSocket", f"ws://{place}/ws")
        table.add_row("HTTP", f"http://{place}")
        table.add_row("MCP", f"http://{place}/mcp")
        table.add_row("API docs", f"http://{place}/docs{'' if is_open else '?token=TOKEN'}")
        if server is not None:
            table.add_row("Sessions", f"up to {server.max_concurrent_envs}, {server.manager.runner.name} runner")
        if self.workers > 1:
            table.add_row("Workers", f"{self.workers} processes, which share the sessions")
        if self.watches:
            table.add_row("Sources", "are watched; a change restarts the server")
        if not is_open:
            table.add_row("Token", token or "as configured")
        elif not is_loopback(self.host):
            table.add_row("Network", f"[yellow]{escape(self.host)}: open to others, without authentication[/]")
        console = Console(stderr=True)
        name = self.target if server is None else server.service.env_name
        console.print(Panel(table, title=f"[bold]{escape(name)}[/] is served", subtitle="Ctrl-C stops", expand=False))
        for note in () if server is None else _notes(server):
            console.print(f"Note: {note}", style="yellow", markup=False, highlight=False)
        # What follows is outside of the frame and never wrapped, so that it can be copied.
        lines = []
        if has_page and token is not None:
            # The token stands behind a '#', which no browser sends to any server; the page takes it from there.
            lines += ["Open the page:", f"http://{place}/web/#token={token}"]
        if server is not None and server.service.mode is ServerMode.SIMULATION:
            argument = "" if is_open else f', token="{token or "..."}"'
            lines += ["Try it:", "from openenv import GenericEnvClient"]
            lines.append(f'with GenericEnvClient("http://{place}"{argument}).sync() as env: print(env.reset())')
        if lines:
            console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def _leave_on_second_interrupt(app: Any) -> None:
    """Let the first Ctrl-C shut the server down, and the second end the process at once.

    A running call of an environment cannot be interrupted, so a gentler second step would wait for it. What is not
    closed then is named.
    """
    from openenv.server.run import environment_server

    server = environment_server(app)
    stop = signal.getsignal(signal.SIGINT)
    if not callable(stop) or threading.current_thread() is not threading.main_thread():
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        sessions = [] if server is None else [session.id for session in server.manager.slots.all()]
        if sessions:
            sys.stderr.write(f"Not closed: the environments of the sessions {', '.join(sessions)}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signum)

    def stop_once(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, leave)
        stop(signum, frame)

    signal.signal(signal.SIGINT, stop_once)


def import_fastapi() -> None:
    """Import FastAPI without what only the page of an API's documentation needs, so that a server starts sooner.

    While it is imported, FastAPI builds the validators of 40 OpenAPI models and loads email-validator for one field of
    them: a tenth to a fifth of the CPU time until a server listens. Here the models are built on first use. For the
    main thread of a program that has just started: imports in other threads are affected too.
    """
    if "fastapi" in sys.modules:
        return
    config: dict[str, Any]
    try:
        from pydantic._internal._config import config_defaults as config  # type: ignore[assignment]
    except ImportError:  # another pydantic: the models are built at once, as usual
        config = {"defer_build": False}
    before, config["defer_build"] = config["defer_build"], True
    hidden = {"email_validator"} - sys.modules.keys()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # its import fails, as if it were not installed
    try:
        import fastapi.openapi.models  # noqa: F401 - for its effect: the models are made now
    finally:
        config["defer_build"] = before
        for name in hidden:
            del sys.modules[name]


def _unless_set(option: _OptionT | None, setting: Callable[[], object], declared: _OptionT | None) -> _OptionT | None:
    """Return an option, or else what the manifest declares, unless a variable says it."""
    return declared if option is None and setting() is None else option


def _worker_count(option: str | None) -> int:
    """Return how many processes to start, from the option or `OPENENV_WORKERS`."""
    from openenv.server.runners import cores

    text, source = (option, "--workers") if option is not None else (settings.workers() or "1", "OPENENV_WORKERS")
    if text.strip().lower() == "auto":
        return cores()
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise typer.BadParameter(f"expected a number of processes above 0, or auto, not {text!r}", param_hint=source)
    return count


def _check_pinning(workers: int, runner: str | None, *, is_wanted: bool) -> None:
    """Refuse `--pin-workers` where it would slow the server down, or do nothing."""
    from openenv.server.runners import cores, has_affinity

    if not is_wanted:
        return
    if not has_affinity():
        raise typer.BadParameter("this system does not bind processes to cores", param_hint="--pin-workers")
    if not 1 < workers <= cores():
        raise typer.BadParameter(f"needs --workers from 2 to {cores()}, one per core", param_hint="--pin-workers")
    if runner == "process":
        raise typer.BadParameter(
            "the processes of --runner process would share the worker's core", param_hint="--pin-workers"
        )


def _has_page(web: bool | None) -> bool:
    """Return whether the page is wanted; the variable stops applications that add the page themselves."""
    if web is False:
        settings.export({"ENABLE_WEB_INTERFACE": "false"})
    return web if web is not None else settings.web_interface_setting() is not False


def _notes(server: HTTPEnvServer) -> Iterator[str]:
    """Yield notes on two settings that newcomers often forget."""
    from openenv.env.binding import declared_action, declared_concurrency, shared_attributes
    from openenv.types import Action

    env_cls = server.manager.env_cls
    if env_cls is None:
        return
    name = env_cls.__name__
    if server.max_concurrent_envs == 1 and not server.manager.is_concurrency_safe:
        shared = shared_attributes(env_cls) if declared_concurrency(env_cls) is None else []
        if shared:
            reason = (
                f"instances of {name} share {', '.join(shared)}; set them in __init__, or SUPPORTS_CONCURRENT_SESSIONS "
                "= True if they never change"
            )
        elif declared_concurrency(env_cls) is None:
            reason = f"{name} does not set SUPPORTS_CONCURRENT_SESSIONS = True"
        else:
            reason = f"{name} sets SUPPORTS_CONCURRENT_SESSIONS = False"
        yield f"one session at a time, the web page's included: {reason}"
    if server.action_cls is Action and declared_action(env_cls) is None:
        yield f"actions have no fields, since {name} names no action class: Environment[MyAction, MyObservation, State]"
