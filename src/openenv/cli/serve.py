"""`openenv serve`: the options, the banner and a quick start; `openenv.server` loads and runs the application."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from openenv import settings
from openenv.protocol.addresses import is_loopback

from .command import check_choice, target_failures
from .options import AccessFlags, Panel, flags_class, options_of

if TYPE_CHECKING:
    from openenv.server.app import HTTPEnvServer
    from openenv.server.loading import ManifestSettings
    from openenv.server.options import ServerOverrides
    from openenv.server.run import HeartbeatOptions, ServeOptions

_OptionT = TypeVar("_OptionT")


# The groups below mirror the panels of `openenv serve --help`. None means that the user said nothing; then the value
# comes from the first place that has one:
#
#   option  >  variable (OPENENV_...)  >  openenv.yaml  >  the application's own argument  >  the default
#
# `_overrides` and `_unless_set` implement this order.
@flags_class
class SessionFlags:
    """Options of sessions; None leaves a decision to the variables, `openenv.yaml` and the application."""

    max_sessions: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum number of sessions; by default the application's. A bare class gets 256, or 1 if its "
            "instances share state.",
        ),
    ] = None
    runner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where environment code runs: thread, inline (on the event loop, for steps of microseconds), process "
            "(in worker processes, for code that needs all cores or may crash), or auto, which is thread.",
        ),
    ] = None
    env_processes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --runner process: number of worker processes; one per core by default."
        ),
    ] = None
    sessions_per_process: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --runner process: maximum sessions per process; unlimited by default."
        ),
    ] = None
    session_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="End unused HTTP sessions after this time; by default 900."),
    ] = None
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="How long a session waits for a client that lost its connection; by default 60. With 0 it ends at "
            "once.",
        ),
    ] = None
    close_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="Time limit for closing an environment; then its slot becomes free. By default 30.",
        ),
    ] = None
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="How long sessions may continue after SIGTERM, while new ones are refused. By default 0: only running "
            "calls finish.",
        ),
    ] = None
    max_agent_sessions: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Maximum number of sessions that agents open; by default all but one."),
    ] = None


@flags_class
class EpisodeFlags:
    """Options of recorded episodes."""

    record: Annotated[
        str | None,
        typer.Option(
            metavar="WHOSE",
            help="Which episodes to keep on disk, for the Episodes tab and openenv replay: page (played on the web "
            "page, the default), all, or off.",
        ),
    ] = None
    record_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Their folder; by default OPENENV_EPISODES, else one in your data folder."),
    ] = None
    record_episodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Maximum number of episodes; by default 1000.")
    ] = None
    record_mb: Annotated[
        float | None,
        typer.Option(metavar="MB", min=0.001, help="Maximum disk space; by default 256. The oldest are deleted."),
    ] = None


@flags_class
class ServeFlags:
    """Options of `openenv serve`."""

    target: Annotated[str, typer.Argument(metavar="TARGET", help="What to serve: a folder, a file or a module.")] = "."
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            "-p",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port; 0 takes any free one. By default the one in openenv.yaml, else 8000.",
        ),
    ] = None
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Server processes that share the port and all limits; auto is one per core. By default 1.",
        ),
    ] = None
    pin_workers: Annotated[
        bool,
        typer.Option("--pin-workers", help="Pin each worker to a core; for environments that start no threads."),
    ] = False
    heartbeat_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="With --workers: a worker that is silent for this long gets no new sessions; by default 2.5.",
        ),
    ] = None
    replace_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="With --workers: a worker that is silent for this long is killed and replaced; by default 5, 0 for "
            "never.",
        ),
    ] = None
    reload: Annotated[bool, typer.Option("--reload", help="Restart when a source file changes.")] = False
    web: Annotated[bool | None, typer.Option("--web/--no-web", help="Serve a web page at /web; on by default.")] = None
    max_message_mb: Annotated[
        float | None,
        typer.Option(metavar="MB", min=0.001, help="Largest accepted request; by default 100, or the application's."),
    ] = None
    max_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum requests in one batch of a vector client; by default 10000, or the application's.",
        ),
    ] = None
    max_unread_mb: Annotated[
        float | None,
        typer.Option(
            metavar="MB",
            min=0.001,
            help="Maximum unread data of all clients together; beyond that, the slowest readers are disconnected. By "
            "default 1024, or the application's.",
        ),
    ] = None
    sessions: Annotated[SessionFlags, Panel("Sessions")]
    episodes: Annotated[EpisodeFlags, Panel("Episodes")]
    access: Annotated[AccessFlags, Panel("Access")]
    log_level: Annotated[
        str,
        typer.Option(metavar="LEVEL", help="critical, error, warning, info, debug or trace.", rich_help_panel="Logs"),
    ] = "info"
    log_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="text, or json: one object per line, with session and request.",
            rich_help_panel="Logs",
        ),
    ] = None

    def check(self) -> None:
        """Raise for choices that do not exist and for options that contradict each other."""
        check_choice("--log-format", self.log_format, ("text", "json"))
        check_choice("--log-level", self.log_level, ("critical", "error", "warning", "info", "debug", "trace"))
        check_choice("--record", self.episodes.record, ("page", "all", "off"))
        if self.web is False and self.episodes.record in ("page", "all"):
            raise typer.BadParameter("the web page shows recorded episodes", param_hint="--record, --no-web")


@options_of(ServeFlags)
def serve(flags: ServeFlags) -> None:
    """Serve an environment over WebSocket, HTTP and MCP, on one port. Play it by hand on the web page at /web.

    TARGET is one of these, by default the current folder:

      a folder                       openenv serve envs/gridworld_env
      a Python file                  openenv serve my_env.py
      a class or an app in a file    openenv serve my_env.py:MyEnvironment
      a module                       openenv serve my_package.server.app:app
      a Gymnasium environment        openenv serve gymnasium:CartPole-v1
      a PettingZoo environment       openenv serve pettingzoo:classic/tictactoe_v3

    A folder is served like uvicorn server.app:app inside it, unless its openenv.yaml names another application. The
    folder becomes the working folder. For a class, the annotations name the models.

    During development:

      openenv serve my_env.py --reload --log-level debug

    With all cores of the machine, for many sessions:

      openenv serve my_env.py --workers auto

    For other machines, with a token that is created and printed:

      openenv serve my_env.py --host 0.0.0.0
    """
    # The processes of a server:
    #
    #   openenv serve               this process loads the application and serves
    #
    #   openenv serve --workers 4   this process (supervisor) ──> worker ──> worker ──> worker ──> worker
    #                               owns the port, restarts dead workers, sees no request
    #
    #   openenv serve --reload      this process (watches the sources) ──> one serving process, restarted after a change
    #
    # `Introduction` runs in the process that knows the application and the actual port.
    gc.disable()  # nothing is garbage while everything loads; `run` turns it on again
    # Before the first import of `openenv.server`, which imports FastAPI.
    import_fastapi()
    from openenv.server.loading import enter_folder, manifest_settings  # servers load only for this command
    from openenv.server.run import serve as run
    from openenv.server.run import serve_reloading

    # All contradictions are found before the target loads: loading runs the user's code and may take seconds.
    flags.check()
    # Order: read the manifest, resolve relative paths of options, then enter the target's folder. Afterwards a
    # relative --record-dir would mean another folder.
    with target_failures():
        manifest = manifest_settings(flags.target)
        overrides = _overrides(flags, manifest)
        target = enter_folder(flags.target)
    # On standard error, as all messages here: standard output belongs to the environment.
    for note in manifest.notes:
        typer.secho(f"Note: {note}", fg="yellow", err=True)
    options = _serve_options(flags, manifest, overrides)
    introduction = Introduction(
        target,
        options.host,
        options.port,
        options.access.spare_token,
        options.log_level,
        options.log_format,
        watches=flags.reload,
        workers=options.workers,
    )
    try:
        with target_failures():
            # Blocks until Ctrl-C or SIGTERM. `target_failures` prints a traceback of the target's code in full.
            (serve_reloading if flags.reload else run)(target, options, introduction)
    finally:
        # `run` turns it on before it serves; this line is for targets that fail to load.
        gc.enable()


def _serve_options(flags: ServeFlags, manifest: ManifestSettings, overrides: ServerOverrides) -> ServeOptions:
    """Merge options, variables and manifest; raise for values that do not fit together."""
    from openenv.server.run import AccessOptions, ServeOptions

    runner = _unless_set(flags.sessions.runner, settings.runner_name, manifest.runner) or settings.runner_name()
    # Checked after merging: the value may come from OPENENV_RUNNER or openenv.yaml.
    check_choice("--runner", runner, ("auto", "thread", "inline", "process"))
    # These options would otherwise be ignored silently by the thread runner.
    if (flags.sessions.env_processes or flags.sessions.sessions_per_process) and runner != "process":
        raise typer.BadParameter("these need --runner process", param_hint="--env-processes, --sessions-per-process")
    log_format = flags.log_format or settings.log_format() or "text"
    check_choice("OPENENV_LOG_FORMAT", log_format, ("text", "json"))
    workers = _worker_count(_unless_set(flags.workers, settings.workers, manifest.workers))
    if flags.reload and workers > 1:
        raise typer.BadParameter("--reload serves with one process", param_hint="--workers")
    # Needs the final number of workers and the final runner.
    if flags.pin_workers:
        _check_pinning(workers, runner)
    access = flags.access
    return ServeOptions(
        flags.host,
        manifest.port if flags.port is None else flags.port,
        flags.log_level,
        log_format,
        web=_has_page(flags.web),
        workers=workers,
        pin_workers=flags.pin_workers,
        heartbeat=_heartbeat(flags, workers),
        access=AccessOptions(access.token, access.agent_token, access.observer_token, access.spare_token(flags.host)),
        server=overrides,
    )


def _overrides(flags: ServeFlags, manifest: ManifestSettings) -> ServerOverrides:
    """Return the server's options: the command line wins over variables, and those over `openenv.yaml`.

    A value of None leaves the decision to the variable, or else to the application.
    """
    from openenv.server.options import in_bytes

    sessions, episodes = flags.sessions, flags.episodes
    return {
        "sessions": _unless_set(sessions.max_sessions, settings.max_sessions, manifest.max_sessions),
        "session_timeout_s": _unless_set(sessions.session_timeout, settings.session_timeout, manifest.session_timeout),
        "session_grace_s": sessions.grace,
        "close_timeout_s": sessions.close_timeout,
        "drain_timeout_s": sessions.drain_timeout,
        "max_agent_sessions": sessions.max_agent_sessions,
        "runner": _unless_set(sessions.runner, settings.runner_name, manifest.runner),
        "env_processes": sessions.env_processes,
        "sessions_per_process": sessions.sessions_per_process,
        "max_message_bytes": in_bytes(flags.max_message_mb),
        "max_batch": flags.max_batch,
        "max_unread_bytes": in_bytes(flags.max_unread_mb),
        "record": episodes.record,
        # Absolute, because the target's folder becomes the working folder next.
        "record_dir": None if episodes.record_dir is None else episodes.record_dir.resolve(),
        "record_episodes": episodes.record_episodes,
        "record_bytes": in_bytes(episodes.record_mb),
    }


@dataclass(frozen=True)
class Introduction:
    """Announces the server on the terminal: with a banner, or in quiet modes with address and token only."""

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
        """Print addresses, token and a quick start."""
        from openenv.server.access import Role
        from openenv.server.run import environment_server

        # None for an application that `create_app` did not make; it gets a banner without sessions and token.
        server = environment_server(app)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # programs on this machine use it
        place = f"[{host}]:{actual}" if ":" in host else f"{host}:{actual}"
        # If OPENENV_TOKEN or the application set another token, printing the spare one would mislead.
        accepted = self.spare is not None and server is not None and server.access.role(self.spare) is Role.ORCHESTRATOR
        token = self.spare if accepted else None
        is_silent = self.log_level in ("critical", "error", "warning")
        # The output by level and format:
        #
        #   --log-level info, text     the banner
        #   --log-format json          only `token: ...`: a frame of box characters would not be JSON either
        #   --log-level warning        `http://127.0.0.1:41233` with --port 0, which scripts read, and `token: ...`
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

        # The banner:
        #
        #   ╭────────────── maze_env is served ──────────────╮
        #   │  Web page   http://127.0.0.1:8000/web          │
        #   │  WebSocket  ws://127.0.0.1:8000/ws             │
        #   │  ...                                           │
        #   ╰───────────────── Ctrl-C stops ─────────────────╯
        #   Try it:
        #   from openenv import GenericEnvClient
        #   with GenericEnvClient("http://127.0.0.1:8000").sync() as env: print(env.reset())
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
        # Browsers cannot send a header from the address bar, so the page of a protected server takes a query parameter.
        table.add_row("API docs", f"http://{place}/docs{'' if is_open else '?token=TOKEN'}")
        if server is not None:
            table.add_row("Sessions", f"up to {server.max_concurrent_envs}, {server.manager.runner.name} runner")
        if self.workers > 1:
            table.add_row("Workers", f"{self.workers} processes, which share the sessions")
        if self.watches:
            table.add_row("Sources", "are watched; a change restarts the server")
        # The token itself only if it was created now; a configured one stays out of logs.
        if not is_open:
            table.add_row("Token", token or "as configured")
        elif not is_loopback(self.host):
            table.add_row("Network", f"[yellow]{escape(self.host)}: open to others, without authentication[/]")
        # Standard error: standard output may be piped, and belongs to the environment.
        console = Console(stderr=True)
        name = self.target if server is None else server.service.env_name
        console.print(Panel(table, title=f"[bold]{escape(name)}[/] is served", subtitle="Ctrl-C stops", expand=False))
        for note in () if server is None else _notes(server):
            console.print(f"Note: {note}", style="yellow", markup=False, highlight=False)
        # These lines are outside of the frame and never wrapped, so that users can copy them.
        lines = []
        if has_page and token is not None:
            # Browsers never send the part behind '#' to a server; the page's script reads the token there.
            lines += ["Open the page:", f"http://{place}/web/#token={token}"]
        if server is not None and server.service.mode is ServerMode.SIMULATION:
            argument = "" if is_open else f', token="{token or "..."}"'
            lines += ["Try it:", "from openenv import GenericEnvClient"]
            lines.append(f'with GenericEnvClient("http://{place}"{argument}).sync() as env: print(env.reset())')
        if lines:
            console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def _leave_on_second_interrupt(app: Any) -> None:
    """Let the first Ctrl-C shut the server down, and the second end the process at once.

    A running call of an environment cannot be interrupted, so a gentler second step would wait for it. The process
    names the sessions with open environments.
    """
    from openenv.server.run import environment_server

    # Signals of a server in the foreground:
    #
    #   first Ctrl-C     uvicorn's handler: refuse new sessions, finish calls, close environments
    #   second Ctrl-C    `leave`: name the sessions with open environments, exit with 130 at once
    server = environment_server(app)
    stop = signal.getsignal(signal.SIGINT)
    # `SIG_IGN` and `SIG_DFL` are not callable: a shell starts background jobs with SIGINT ignored. Only the main thread
    # can set handlers.
    if not callable(stop) or threading.current_thread() is not threading.main_thread():
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        sessions = [] if server is None else [session.id for session in server.manager.slots.all()]
        if sessions:
            sys.stderr.write(f"Not closed: the environments of the sessions {', '.join(sessions)}\n")
        # `os._exit` skips the interpreter's flush at exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signum)

    def stop_once(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, leave)
        stop(signum, frame)

    signal.signal(signal.SIGINT, stop_once)


def import_fastapi() -> None:
    """Import FastAPI without the parts for its documentation page, so that a server starts sooner.

    FastAPI's import builds the validators of 40 OpenAPI models and loads email-validator for one of their fields: 10 to
    20 % of the CPU time until a server listens. Here the models are built on first use. Call this only in the main
    thread of a program that has just started, because it affects imports in other threads.
    """
    if "fastapi" in sys.modules:
        return
    # pydantic reads this dictionary whenever a model class without its own setting is created.
    config: dict[str, Any]
    try:
        from pydantic._internal._config import config_defaults as config  # type: ignore[assignment]
    except ImportError:  # another pydantic: the models are built at once, as usual
        config = {"defer_build": False}
    before, config["defer_build"] = config["defer_build"], True
    # FastAPI falls back to a plain text field if the import fails. Only hide the module if nobody imported it before.
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
    """Return the option; without it the manifest's value, unless a variable is set, which the server reads later."""
    return declared if option is None and setting() is None else option


def _worker_count(option: str | None) -> int:
    """Return the number of server processes, from the option or `OPENENV_WORKERS`."""
    from openenv.server.runners import cores

    # The message names the option or the variable that the user has to correct.
    text, source = (option, "--workers") if option is not None else (settings.workers() or "1", "OPENENV_WORKERS")
    if text.strip().lower() == "auto":
        return cores()
    try:
        count = int(text)
    # Fails below with the same message as 0 and negative numbers.
    except ValueError:
        count = 0
    if count < 1:
        raise typer.BadParameter(f"expected a number of processes above 0, or auto, not {text!r}", param_hint=source)
    return count


def _heartbeat(flags: ServeFlags, workers: int) -> HeartbeatOptions:
    """Return when a worker counts as hung, from the options or their variables."""
    from openenv.server.run import HeartbeatOptions

    if workers == 1 and (flags.heartbeat_timeout, flags.replace_timeout) != (None, None):
        raise typer.BadParameter("needs --workers", param_hint="--heartbeat-timeout, --replace-timeout")
    usual = HeartbeatOptions()
    timeout_s = flags.heartbeat_timeout or settings.heartbeat_timeout() or usual.timeout_s
    replace_s = settings.replace_timeout() if flags.replace_timeout is None else flags.replace_timeout
    try:
        return HeartbeatOptions(timeout_s, max(usual.replace_s, timeout_s) if replace_s is None else replace_s)
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--heartbeat-timeout, --replace-timeout") from None


def _check_pinning(workers: int, runner: str | None) -> None:
    """Refuse `--pin-workers` if it would slow the server down or have no effect."""
    from openenv.server.runners import cores, has_affinity

    # Not every system has calls to pin a process; ignoring the option would invalidate a benchmark.
    if not has_affinity():
        raise typer.BadParameter("this system cannot pin processes to cores", param_hint="--pin-workers")
    # One worker has nothing to be pinned beside, and two workers on one core would wait for each other.
    if not 1 < workers <= cores():
        raise typer.BadParameter(f"needs --workers from 2 to {cores()}, one per core", param_hint="--pin-workers")
    if runner == "process":
        raise typer.BadParameter(
            "the processes of --runner process would share the worker's core", param_hint="--pin-workers"
        )


def _has_page(web: bool | None) -> bool:
    """Return whether to serve the page; the variable also stops applications that add the page themselves."""
    # A published application may add the page in its own code, by this variable; the option must win over it.
    if web is False:
        settings.export({"ENABLE_WEB_INTERFACE": "false"})
    return web if web is not None else settings.web_interface_setting() is not False


def _notes(server: HTTPEnvServer) -> Iterator[str]:
    """Yield notes on two settings that newcomers often forget."""
    from openenv.env.binding import declared_action, declared_concurrency, shared_attributes
    from openenv.types import Action

    # Printed below the banner, for example:
    #
    #   Note: one session at a time, the web page's included: Maze does not set SUPPORTS_CONCURRENT_SESSIONS = True
    #   Note: actions have no fields: declare them with Maze(Environment[MyAction, MyObservation, State])
    env_cls = server.manager.env_cls
    # A factory function instead of a class: there is nothing to inspect.
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
        yield f"actions have no fields: declare them with {name}(Environment[MyAction, MyObservation, State])"
