"""`openenv serve`: an environment package, an application or just a class, on a port.

Knows options and the banner; loading and running are the server's.
"""

from __future__ import annotations

from typing import Any

import typer

_EXAMPLES = """
Serve an environment.

TARGET is one of

  * a folder with an openenv.yaml:   openenv serve envs/gridworld_env
  * a Python file:                   openenv serve my_env.py
  * a module:                        openenv serve my_package.server.app:app

and `:NAME` picks an application, an Environment class or a factory in a file or module. A class needs nothing else:
its models are read from its annotations.
"""


def serve(
    target: str = typer.Argument(".", metavar="TARGET", help="What to serve; by default the folder you are in."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, "--port", "-p", min=0, max=65535, help="Port; 0 takes any free one."),
    max_sessions: int | None = typer.Option(None, min=1, help="Sessions held at once; by default what the app says."),
    runner: str | None = typer.Option(
        None, help="Where environment code runs: auto, thread or inline (on the event loop, for microsecond steps)."
    ),
    session_timeout: float | None = typer.Option(None, min=0.001, help="Seconds before an unused HTTP session ends."),
    reload: bool = typer.Option(False, "--reload", help="Start anew when a source file changes."),
    log_level: str = typer.Option("info", help="critical, error, warning, info, debug or trace."),
) -> None:
    from ..server.loading import TargetError  # servers load only for this command
    from ..server.run import ServeOptions
    from ..server.run import serve as run

    _check_choice("runner", runner, ("auto", "thread", "inline"))
    _check_choice("log-level", log_level, ("critical", "error", "warning", "info", "debug", "trace"))
    options = ServeOptions(host, port, max_sessions, session_timeout, runner, reload, log_level)
    quiet = log_level in ("critical", "error", "warning")
    try:
        run(target, options, lambda app, actual: None if quiet else _show_banner(app, target, host, actual))
    except TargetError as exc:
        typer.secho(f"Error: {exc}", fg="red", err=True)
        raise typer.Exit(1) from None


serve.__doc__ = _EXAMPLES


def _check_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}", param_hint=f"--{option}")


def _show_banner(app: Any, target: str, host: str, port: int) -> None:
    from rich.console import Console  # a server that starts quietly need not load it
    from rich.panel import Panel
    from rich.table import Table

    from ..server.run import environment_server

    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(no_wrap=True)
    table.add_row("WebSocket", f"ws://{place}/ws")
    table.add_row("HTTP", f"http://{place}")
    table.add_row("API docs", f"http://{place}/docs")
    server = environment_server(app)
    name = target
    if server is not None:
        name = server.service.env_name
        table.add_row("Sessions", f"up to {server.max_concurrent_envs}, {server.manager.runner.name} runner")
        if any(getattr(route, "path", None) == "/web" for route in app.routes):
            table.add_row("Web page", f"http://{place}/web")
    table.add_row("Try it", f'GenericEnvClient(base_url="http://{place}").reset()')
    panel = Panel(table, title=f"[bold]{name}[/] is served", subtitle="Ctrl-C stops", expand=False)
    Console(stderr=True).print(panel)
