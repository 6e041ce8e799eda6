"""`openenv sandboxes`: list the backends, and check one against the sandbox contract."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from openenv.errors import message_of

from .command import HelpCommand, command_group

if TYPE_CHECKING:
    from rich.console import Console

    from openenv.sandboxes import Sandboxes
    from openenv.sandboxes.checks import CheckResult

sandboxes = command_group("List the sandboxes that can run here, and check their isolation.")
_MARKS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "not offered": "[dim]–[/]"}
_UNSAFE = "i_know_there_is_no_isolation"
_Name = TypeVar("_Name", str, "str | None")


# `--sandbox my_backend:MySandboxes`: an installed program has its script's folder on the path and not the current one.
def import_from_here(name: _Name) -> _Name:
    """Let a backend written as `module:Class` be imported from the current folder."""
    if name is not None and ":" in name and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return name


Sandbox = Annotated[
    str,
    typer.Option(
        metavar="BACKEND",
        callback=import_from_here,
        help="Where commands run: local, docker, kubernetes, e2b, daytona, or module:Class.",
    ),
]


@sandboxes.command("ls", cls=HelpCommand)
def ls() -> None:
    """List the backends, with missing prerequisites.

    The command starts one sandbox of each and shows the time.

      openenv sandboxes ls
    """
    from rich.console import Console
    from rich.table import Table

    from openenv._lazy import plugin_names
    from openenv.sandboxes.base import BACKENDS

    console = Console()
    # Sample:
    #
    #   backend  runs here   start   features, or missing
    #   docker   no                  The docker engine does not answer ...
    #   local    yes         170 ms  ...
    #   process  on request          no isolation: ...
    table = Table("backend", "runs here", "start", "features, or missing", box=None, pad_edge=False)
    for name in plugin_names(BACKENDS):
        # Starting a container or a pod may take seconds.
        with console.status(f"trying {name}"):
            table.add_row(name, *_try_backend(name))
    console.print(table)


@sandboxes.command("check", cls=HelpCommand)
def check(
    backend: str = typer.Argument(
        ..., metavar="BACKEND", help="local, docker, kubernetes, e2b, daytona, process, or module:Class."
    ),
    only: list[str] = typer.Option(
        [], "--only", metavar="PREFIX", help="Only checks whose id begins with this; may be repeated."
    ),
    failed: bool = typer.Option(False, "--failed", help="Show failed checks only."),
) -> None:
    """Check a backend against the sandbox contract: each check runs a program or an attack in a real sandbox.

    Exits with 1 if a check fails or leaves something behind.

      openenv sandboxes check local
      openenv sandboxes check docker --only isolation. --failed
      openenv sandboxes check my_backend:MySandboxes
    """
    from rich.console import Console

    from openenv.sandboxes.checks import CHECKS, self_check

    console = Console(highlight=False)
    chosen = _backend(backend)
    total = sum(not only or one.id.startswith(tuple(only)) for one in CHECKS)
    results: list[CheckResult] = []
    started = time.monotonic()
    with console.status(f"0 of {total} checks") as status:

        def show(result: CheckResult) -> None:
            results.append(result)
            status.update(f"{len(results)} of {total} checks")
            if result.status == "failed" or not failed:
                _print(console, result)

        # Results are printed one by one, because a complete check takes a while.
        self_check(chosen, report=show, only=only)
    counts = {name: sum(result.status == name for result in results) for name in _MARKS}
    tally = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    console.print(f"{chosen.name}: {tally or 'no such check'}, in {time.monotonic() - started:.1f} s")
    # After all checks: sandboxes, processes or files of the backend that nothing removed.
    leftovers = chosen.leftovers()
    for name in leftovers:
        console.print(f"[red]left behind:[/] {name}")
    # No result means that --only matches no check: a mistyped prefix must not pass in CI.
    if counts["failed"] or leftovers or not results:
        raise typer.Exit(1)


def _print(console: Console, result: CheckResult) -> None:
    # Short durations are noise.
    seconds = f" [dim]{result.duration_s:.1f} s[/]" if result.duration_s >= 0.5 else ""
    console.print(f"{_MARKS[result.status]} {result.id:<24} {result.says}{seconds}")
    if result.detail:
        style = "red" if result.status == "failed" else "dim"
        console.print(f"  [{style}]{_escaped(result.detail)}[/]")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _try_backend(name: str) -> tuple[str, str, str]:
    """Start a sandbox; return whether that works, the time, and the features or the missing prerequisite."""
    # It has no isolation, so it is never started without the user's explicit argument.
    if name == "process":
        return "on request", "", f"no isolation: backend('process', {_UNSAFE}=True)"
    try:
        chosen = _backend(name)
        # Prerequisites first, because their error has advice; then a real start, because prerequisites prove little.
        chosen.check()
        started = time.monotonic()
        with chosen.open() as sandbox:
            sandbox.exec(["true"])
            seconds = time.monotonic() - started
    except (RuntimeError, ImportError, ValueError, TypeError, AttributeError) as error:  # or the plugin is broken
        return "[red]no[/]", "", _escaped(message_of(error))
    return "[green]yes[/]", f"{seconds * 1000:.0f} ms", ", ".join(sorted(chosen.features))


def _backend(name: str) -> Sandboxes:
    from openenv.sandboxes.base import backend

    return backend(import_from_here(name), **({_UNSAFE: True} if name == "process" else {}))
