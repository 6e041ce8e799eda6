"""`openenv serve`: an environment package, an application or just a class, on a port.

Knows options and the banner; loading and running are the server's.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import secrets
import signal
import sys
import threading
from types import FrameType
from typing import Any

import typer

from .. import settings
from .quick_imports import import_fastapi

_EXAMPLES = """
Serve an environment.

TARGET is one of

  * a folder with an openenv.yaml:   openenv serve envs/gridworld_env
  * a Python file:                   openenv serve my_env.py
  * a module:                        openenv serve my_package.server.app:app
  * an environment of Gymnasium's:   openenv serve gymnasium:CartPole-v1

and `:NAME` picks an application, an Environment class or a factory in a file or module. A class needs nothing else:
its models are read from its annotations.
"""


def serve(
    target: str = typer.Argument(".", metavar="TARGET", help="What to serve; by default the folder you are in."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, "--port", "-p", min=0, max=65535, help="Port; 0 takes any free one."),
    max_sessions: int | None = typer.Option(None, min=1, help="Sessions held at once; by default what the app says."),
    runner: str | None = typer.Option(
        None,
        help="Where environment code runs: auto, thread, inline (on the event loop, for microsecond steps) or process "
        "(in worker processes, for code that needs all cores or may crash).",
    ),
    env_processes: int | None = typer.Option(
        None, min=1, help="With --runner process: over how many processes sessions are spread; one for each core."
    ),
    sessions_per_process: int | None = typer.Option(
        None, min=1, help="With --runner process: how many sessions one process may hold; any number."
    ),
    session_timeout: float | None = typer.Option(None, min=0.001, help="Seconds before an unused HTTP session ends."),
    grace: float | None = typer.Option(
        None, min=0.0, help="Seconds for which a session waits for a client whose connection broke; 60, 0 for none."
    ),
    max_agent_sessions: int | None = typer.Option(None, min=0, help="How many of the sessions agents may open."),
    token: str | None = typer.Option(
        None, help="Ask clients for this token; better set OPENENV_TOKEN, which others on this machine cannot see."
    ),
    agent_token: str | None = typer.Option(None, help="A token with which agents may call tools, and nothing else."),
    observer_token: str | None = typer.Option(None, help="A token with which one may look, and change nothing."),
    no_token: bool = typer.Option(
        False, "--no-token", help="Make no token where none is given, also beyond this machine."
    ),
    max_message_mb: float | None = typer.Option(None, min=0.001, help="The largest request that is read; 100 MB."),
    reload: bool = typer.Option(False, "--reload", help="Start anew when a source file changes."),
    log_level: str = typer.Option("info", help="critical, error, warning, info, debug or trace."),
    log_format: str | None = typer.Option(None, help="text, or json: one object per line, with session and request."),
) -> None:
    gc.disable()  # until all is loaded, nothing is garbage; `run` turns it on again
    import_fastapi()
    from ..server.loading import TargetError, TargetFailed  # servers load only for this command
    from ..server.run import AccessOptions, ServeOptions
    from ..server.run import serve as run

    _check_choice("runner", runner, ("auto", "thread", "inline", "process"))
    if (env_processes or sessions_per_process) and (runner or settings.runner_name()) != "process":
        raise typer.BadParameter("that is for --runner process", param_hint="--env-processes, --sessions-per-process")
    log_format = log_format or settings.log_format() or "text"
    _check_choice("log-format", log_format, ("text", "json"))
    _check_choice("log-level", log_level, ("critical", "error", "warning", "info", "debug", "trace"))
    if no_token and (token or agent_token or observer_token):
        raise typer.BadParameter("there are tokens to ask for", param_hint="--no-token")
    needs_token = not no_token and (not _is_loopback(host) or agent_token is not None or observer_token is not None)
    spare = secrets.token_urlsafe(24) if needs_token and token is None else None
    access = AccessOptions(token, agent_token, observer_token, spare)
    options = ServeOptions(
        host,
        port,
        max_sessions,
        session_timeout,
        runner,
        reload,
        log_level,
        max_message_mb=max_message_mb,
        access=access,
        log_format=log_format,
        session_grace_s=grace,
        max_agent_sessions=max_agent_sessions,
        env_processes=env_processes,
        sessions_per_process=sessions_per_process,
    )
    is_silent = log_level in ("critical", "error", "warning")
    quiet = is_silent or log_format == "json"

    def started(app: Any, actual: int) -> None:
        _leave_on_second_interrupt()
        if not quiet:
            _show_banner(app, target, host, actual, spare)
            return
        if port == 0 and is_silent:  # nobody could know it otherwise
            typer.echo(f"http://{_place(host, actual)}", err=True)
        tell_token(app)

    def tell_token(app: Any) -> None:
        if (made := _made(app, spare)) is not None:
            typer.echo(f"token: {made}", err=True)

    try:
        run(target, options, started, tell_token)
    except TargetFailed as exc:
        typer.echo(exc.report(), err=True)
        typer.secho(f"Error: {exc}", fg="red", err=True)
        raise typer.Exit(1) from None
    except TargetError as exc:
        typer.secho(f"Error: {exc}", fg="red", err=True)
        raise typer.Exit(1) from None
    finally:
        gc.enable()


serve.__doc__ = _EXAMPLES


def _leave_on_second_interrupt() -> None:
    """Let the first Ctrl-C end the server as it wishes, and a second one the process at once.

    An environment's call cannot be interrupted, so anything gentler would wait for it.
    """
    stop = signal.getsignal(signal.SIGINT)
    if not callable(stop) or threading.current_thread() is not threading.main_thread():
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signum)

    def stop_once(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, leave)
        stop(signum, frame)

    signal.signal(signal.SIGINT, stop_once)


def _check_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}", param_hint=f"--{option}")


def _place(host: str, port: int) -> str:
    """Where a program on this machine finds the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _made(app: Any, spare: str | None) -> str | None:
    """Return the token that was made for this run, if it counts."""
    from ..server.access import Role
    from ..server.run import environment_server

    server = environment_server(app)
    if spare is None or server is None or server.access.role(spare) is not Role.ORCHESTRATOR:
        return None
    return spare


def _show_banner(app: Any, target: str, host: str, port: int, spare: str | None = None) -> None:
    from rich.console import Console  # a server that starts quietly need not load it
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    from ..server.run import environment_server
    from ..types import ServerMode

    place = _place(host, port)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(no_wrap=True)
    table.add_row("WebSocket", f"ws://{place}/ws")
    table.add_row("HTTP", f"http://{place}")
    table.add_row("MCP", f"http://{place}/mcp")
    server = environment_server(app)
    made = _made(app, spare)
    is_open = server is None or server.access.is_open
    table.add_row("API docs", f"http://{place}/docs{'' if is_open else '?token=TOKEN'}")
    name = target
    if server is not None:
        name = server.service.env_name
        table.add_row("Sessions", f"up to {server.max_concurrent_envs}, {server.manager.runner.name} runner")
        if any(getattr(route, "path", None) == "/web" for route in app.routes):
            table.add_row("Web page", f"http://{place}/web")
    if made is not None:
        table.add_row("Token", made)
    elif not is_open:
        table.add_row("Token", "as configured")
    if is_open and not _is_loopback(host):
        table.add_row("Network", f"[yellow]{escape(host)}: open to others, without authentication[/]")
    console = Console(stderr=True)
    console.print(Panel(table, title=f"[bold]{escape(name)}[/] is served", subtitle="Ctrl-C stops", expand=False))
    if server is not None and server.service.mode is ServerMode.SIMULATION:
        # Outside of the frame and never wrapped, so that it can be copied.
        token = f', token="{made}"' if made is not None else "" if is_open else ', token="..."'
        lines = (
            "Try it:",
            "from openenv import GenericEnvClient",
            f'with GenericEnvClient("http://{place}"{token}).sync() as env: print(env.reset())',
        )
        console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
