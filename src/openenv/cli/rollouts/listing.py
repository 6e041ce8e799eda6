"""`openenv rollouts ls` and `stats`: tables of stored rollouts, newest first or counted."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from openenv import settings

from ..command import check_choice, printable
from ..options import flags_class, options_of
from .selection import Json, SelectionFlags, Store, open_store, print_table, reward_text

if TYPE_CHECKING:
    from rich.table import Table

    from openenv.rollout.store.rollout_index import Grouping, RolloutRow, RolloutStats

# The words of --by, and the columns of the index that they mean.
_GROUPINGS: Final[dict[str, Grouping]] = {
    "task": "task_id",
    "group": "group",
    "agent": "agent",
    "model": "model",
    "status": "status",
    "environment": "environment",
    "policy-version": "policy_version",
    "verdict": "verdict",
}


def _checked_grouping(by: str) -> str:
    check_choice("--by", by, tuple(_GROUPINGS))
    return by


@flags_class
class ListFlags:
    """Options of `openenv rollouts ls`."""

    store: Store = None
    selection: SelectionFlags
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of rollouts, newest first.")] = 50
    as_json: Json = False


@options_of(ListFlags)
def list_rollouts(flags: ListFlags) -> None:
    """List stored rollouts, newest first.

    Examples:

      openenv rollouts ls --status ok --limit 5
      openenv rollouts ls --task binary_search --since 2h --json
    """
    # A missing default store means that nothing ran yet; a missing store in --store is an error.
    if flags.store is None and not settings.rollout_store().exists():
        empty: dict[str, list[object]] = {"rollouts": [], "interrupted": []}
        typer.echo(json.dumps(empty, indent=2) if flags.as_json else f"No rollouts yet in {settings.rollout_store()}.")
        return
    with open_store(flags.store) as store:
        rows = store.find(flags.selection.filter(store), limit=flags.limit)
        interrupted = store.interrupted()
        if flags.as_json:
            # `interrupted` contains IDs only: their engine ended before an outcome was stored.
            document = {"rollouts": [_row_document(row) for row in rows], "interrupted": interrupted}
            typer.echo(json.dumps(document, indent=2))
            return
        if not rows:
            typer.echo(f"No rollouts in {store.root}{flags.selection.described()}.")
        else:
            print_table(_rows_table(rows, now=time.time()))
        if interrupted:
            typer.echo(f"{len(interrupted)} more were interrupted with their engine: {', '.join(interrupted[:5])}")
            typer.echo("Continue them with openenv rollouts resume.")


@flags_class
class StatsFlags:
    """Options of `openenv rollouts stats`."""

    by: Annotated[
        str,
        typer.Option(
            metavar="COLUMN", help=f"The column to group by: {', '.join(_GROUPINGS)}.", callback=_checked_grouping
        ),
    ] = "task"
    store: Store = None
    selection: SelectionFlags
    as_json: Json = False


@options_of(StatsFlags)
def show_stats(flags: StatsFlags) -> None:
    """Show pass rates, mean rewards with their spread, turns and seconds, by task, agent or model.

    A rollout passes with a reward of 1. Rollouts without a reward, after a failure of the infrastructure, count as
    rollouts only. The interval contains the pass rate with 95 % confidence.

    Examples:

      openenv rollouts stats --since 1d
      openenv rollouts stats --by model --task binary_search
    """
    with open_store(flags.store) as store:
        where = flags.selection.filter(store)
        figures = store.stats(where, by=_GROUPINGS[flags.by])
        # The line `all` is computed from all rollouts and not from the group lines: a mean of means would be wrong.
        whole = store.stats(where)
    if flags.as_json:
        total = _stats_document(whole[0]) if whole else None
        document = {"by": flags.by, "rows": [_stats_document(each) for each in figures], "all": total}
        typer.echo(json.dumps(document, indent=2))
    elif not figures:
        typer.echo("No rollouts match.")
    else:
        print_table(_stats_table(flags.by, figures, whole[0] if len(figures) > 1 else None))


def _rows_table(rows: list[RolloutRow], now: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    # Sample:
    #
    #   ID        TASK           AGENT     STATUS  REWARD  TRUST   TURNS  SECONDS   AGE
    #   3f2a91c0  binary_search  opencode  ok           1  judged      7     41.2  3 min
    #
    # TRUST is how far the reward can be trusted; TURNS counts model calls.
    table = Table(box=None, pad_edge=False)
    table.add_column("ID", no_wrap=True, min_width=max(len(row.rollout_id) for row in rows))  # users copy it
    for column in ("TASK", "AGENT", "STATUS"):
        table.add_column(column, no_wrap=True)
    table.add_column("REWARD", justify="right", no_wrap=True, min_width=len("REWARD"))
    table.add_column("TRUST", no_wrap=True)
    for column in ("TURNS", "SECONDS"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    table.add_column("AGE", justify="right", no_wrap=True, min_width=len("119 min"))
    for row in rows:
        age = _age(now - row.stored_at)
        # `Text`: rich would read brackets in a string, such as a task's name, as styles.
        status = Text(row.status, style="green" if row.status == "ok" else "yellow")
        numbers = (
            reward_text(row.reward, row.reason and row.reason[:40]),
            row.trust or "-",
            str(row.turns),
            f"{row.wall_s:.1f}",
        )
        table.add_row(row.rollout_id, Text(printable(row.task_id)), Text(printable(row.agent)), status, *numbers, age)
    return table


def _age(seconds: float) -> str:
    """Write an age in one unit: 45 s, 12 min, 3 h, 5 d."""
    # The limits keep at least two digits of precision: 119 s, then 2 min; 119 min, then 2 h; 47 h, then 2 d.
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds / unit))} {word}"
    return f"{int(seconds / 86_400)} d"


def _stats_table(by: str, figures: list[RolloutStats], whole: RolloutStats | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    # Sample:
    #
    #   TASK           ROLLOUTS         PASS   95 %     REWARD  SPREAD  TURNS  TOKENS  SECONDS
    #   binary_search  16 (15 scored)  86.7%  62%-96%   0.867  ±0.352    6.1    1840     38.0
    #
    # Only scored rollouts count in PASS, 95 %, REWARD and SPREAD.
    table = Table(box=None, pad_edge=False)
    table.add_column(by.upper(), no_wrap=True)
    for column in ("ROLLOUTS", "PASS", "95 %", "REWARD", "SPREAD", "TURNS", "TOKENS", "SECONDS"):
        table.add_column(column, justify="right", no_wrap=True)
    # With one group, the line `all` would repeat it.
    for each in [*figures, *([] if whole is None else [whole])]:
        name = "all" if each is whole else printable(each.name) or "-"
        rate, interval = each.pass_rate, each.interval
        table.add_row(
            Text(name),
            str(each.rollouts) if each.scored == each.rollouts else f"{each.rollouts} ({each.scored} scored)",
            "-" if rate is None else f"{rate:.1%}",
            "-" if interval is None else f"{interval[0]:.0%}-{interval[1]:.0%}",
            "-" if each.mean is None else f"{each.mean:.3f}",
            "-" if each.deviation is None else f"±{each.deviation:.3f}",
            f"{each.turns:.1f}",
            f"{each.tokens:.0f}",
            f"{each.wall_s:.1f}",
        )
    return table


def _stats_document(stats: RolloutStats) -> dict[str, object]:
    return {**asdict(stats), "pass_rate": stats.pass_rate, "interval": stats.interval}


def _row_document(row: RolloutRow) -> dict[str, object]:
    names = ("rollout_id", "record_id", "kind", "verdict", "task_id", "group", "agent", "model", "sandbox", "status")
    more = ("phase", "reason", "reward", "trust", "turns", "tokens", "started_at", "wall_s", "stored_at")
    return {name: getattr(row, name) for name in (*names, *more)}
