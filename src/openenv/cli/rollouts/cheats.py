"""`openenv rollouts cheats`: agents that try to earn a reward without solving the task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import flags_class, options_of
from ..sandboxes import Sandbox
from .selection import Json, one_line_failures, print_table, reward_text

if TYPE_CHECKING:
    from openenv.testing.cheats import Cheat, CheatReport, CheatResult


@flags_class
class CheatFlags:
    """Options of `openenv rollouts cheats`."""

    sandbox: Sandbox = "local"
    name: Annotated[list[str], typer.Option("--cheat", metavar="ID", help="Run only this cheat; repeatable.")] = field(
        default_factory=list
    )
    family: Annotated[list[str], typer.Option(metavar="FAMILY", help="Run only this family; repeatable.")] = field(
        default_factory=list
    )
    quick: Annotated[bool, typer.Option("--quick", help="Run a representative half, many in one rollout.")] = False
    show_list: Annotated[bool, typer.Option("--list", help="Print the cheats and run none.")] = False
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Number of parallel rollouts.")] = 2
    as_json: Json = False


@options_of(CheatFlags)
def cheats(flags: CheatFlags) -> None:
    """Run agents that cheat: none may earn more than doing nothing earns, or escape an earned 0.

    A win is a higher reward than doing nothing earns, or a change outside of the sandbox. A dodge is a missing reward
    instead of an earned 0. Exits with 1 after a win or a dodge.

      openenv rollouts cheats --quick
      openenv rollouts cheats --sandbox docker --family shadowed-module --json
    """
    from openenv.testing import run_cheats

    # ValueError: an unknown cheat or family; SandboxError: the backend cannot run here.
    with one_line_failures():
        chosen = _chosen_cheats(flags.name, flags.family, quick=flags.quick)
        if flags.show_list:
            _list_cheats(chosen, as_json=flags.as_json)
            return
        with _cheat_progress(len(chosen), visible=not flags.as_json) as on_result:
            report = run_cheats(
                flags.sandbox, cheats=chosen, concurrency=flags.concurrency, quick=flags.quick, on_result=on_result
            )
    if flags.as_json:
        typer.echo(json.dumps(report.document(), indent=2))
    else:
        _print_cheats(report)
    # A task is unfit if its solution earns nothing or doing nothing earns all: then cheats prove nothing.
    if report.succeeded or report.unfit:
        raise typer.Exit(1)


def _chosen_cheats(names: list[str], families: list[str], *, quick: bool) -> list[Cheat]:
    from openenv.testing import all_cheats

    everything = all_cheats()
    unknown = set(names) - {cheat.name for cheat in everything}
    unknown |= set(families) - {cheat.family for cheat in everything}
    if unknown:
        raise ValueError(f"unknown cheat {', '.join(sorted(unknown))}; --list prints all")
    # An explicit choice wins over --quick.
    if names or families:
        return [cheat for cheat in everything if cheat.name in names or cheat.family in families]
    return [cheat for cheat in everything if cheat.quick or not quick]


def _list_cheats(chosen: list[Cheat], *, as_json: bool) -> None:
    if as_json:
        fields = ("name", "family", "what", "aim", "quick")
        listed = [{**{name: getattr(cheat, name) for name in fields}, "task": cheat.task.task_id} for cheat in chosen]
        typer.echo(json.dumps(listed, indent=2))
        return
    from rich.table import Table

    table = Table("ID", "TASK", "AIM", "WHAT", box=None, pad_edge=False)
    for cheat in chosen:
        table.add_row(cheat.name, cheat.task.task_id, cheat.aim, cheat.what)
    print_table(table)
    typer.echo(f"{len(chosen)} cheats in {len({cheat.family for cheat in chosen})} families")


@contextmanager
def _cheat_progress(count: int, *, visible: bool) -> Iterator[Callable[[CheatResult], None]]:
    """Show a bar on a terminal; yield the callback for each result."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    # `transient`: the bar disappears, and the table of results stays.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task("", total=count)
        yield lambda result: bar.update(task, advance=1, description=result.name)


def _print_cheats(report: CheatReport) -> None:
    from rich.table import Table
    from rich.text import Text

    # Sample:
    #
    #   FAMILY           CHEATS  WINS  DODGES
    #   shadowed-module       6     0       0
    #   win    fake-pytest: ok, reward 1; it ...
    #   0 wins and 1 dodges in 42 cheats on local.
    families: dict[str, list[CheatResult]] = {}
    for result in report.results:
        families.setdefault(result.family, []).append(result)
    table = Table("FAMILY", box=None, pad_edge=False)
    for column in ("CHEATS", "WINS", "DODGES"):
        table.add_column(column, justify="right")
    for family, results in families.items():
        counts = [sum(result.kind == kind for result in results) for kind in ("win", "dodge")]
        table.add_row(family, str(len(results)), *(Text(str(n), style="red" if n else "green") for n in counts))
    print_table(table)
    for title, results in (("wins", report.wins), ("dodges", report.dodges)):
        for result in results:
            earned = result.breach or f"{result.status}, reward {reward_text(result.reward)}"
            why = f" ({result.reason})" if result.reason and result.kind == "dodge" else ""
            typer.echo(f"{typer.style(title[:-1], fg='red'):6} {result.name}: {earned}{why}; it {result.what}")
    # The harness itself is broken: the task's solution earns nothing, or doing nothing earns everything.
    for task in report.unfit:
        earned = f"doing nothing {reward_text(report.idle[task])}, its solution {reward_text(report.solved[task])}"
        typer.echo(f"The task {task} proves nothing here: {earned}.")
    # Sample: `3 left out: there is no gcc in the sandbox.` A cheat that did not run proves nothing.
    for reason in sorted(set(report.skipped.values())):
        count = sum(each == reason for each in report.skipped.values())
        typer.echo(f"{count} left out: {reason}.")
    typer.echo(
        f"{len(report.wins)} wins and {len(report.dodges)} dodges in {len(report.results)} cheats on {report.sandbox}."
    )
