"""Options and texts that several commands share: the store, filters for its rollouts, tables, rewards."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from openenv import settings
from openenv.errors import OpenEnvError

from ..command import check_choice, failure, printable
from ..options import flags_class

if TYPE_CHECKING:
    from openenv.rollout.store.outcome import Outcome
    from openenv.rollout.store.rollout_index import RolloutFilter
    from openenv.rollout.store.store import RolloutStore
    from openenv.rollout.tasks.task import Task, Trust

# Copies of the names in `openenv.rollout`, because showing help must not load it; tests compare both.
STATUSES = ("ok", "policy_failed", "truncated", "env_failed", "sandbox_failed", "grader_failed", "cancelled")
TRUSTS = ("shared", "isolated", "judged")
TASKS_HELP = "Task files, YAML or JSON; folders of them; harbor:FOLDER for Harbor's tasks; or names of task sets."
# Without a terminal, rich would assume 80 columns and cut the cells.
_PIPED_WIDTH = 400
# m is a minute, as in `sleep 5m`; months do not exist here.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

Store = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FOLDER",
        help="The folder of stored rollouts; by default OPENENV_ROLLOUTS, else one in your data folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verdict = Annotated[
    str,
    typer.Option(
        metavar="VERDICT",
        help="The verdict to report: first (of the rollout itself), last, or the name of a later one.",
    ),
]


@flags_class
class DrawFlags:
    """Which tasks of a task set to draw."""

    task_count: Annotated[
        int, typer.Option("--tasks", metavar="N", min=1, help="How many tasks to draw from each task set.")
    ] = 10
    task_seed: Annotated[int, typer.Option(metavar="N", help="The seed of the tasks from task sets.")] = 0

    def load(self, paths: list[Path]) -> list[tuple[Path, Task]]:
        """Return all tasks, each with the path or name that it comes from."""
        from openenv.rollout.tasks.task_folders import load_tasks

        return [(path, task) for path in paths for task in load_tasks(path, count=self.task_count, seed=self.task_seed)]


# A callback of Typer: a wrong value ends the command with exit code 2 and the list of choices, before a store opens.
def checked_trust(trust: str | None) -> str | None:
    """Refuse an unknown level of trust."""
    check_choice("--min-trust", trust, TRUSTS)
    return trust


def checked_clock(clock: str | None) -> str | None:
    """Refuse a text that is no time."""
    from openenv.sandboxes.fixed_clock import clock_seconds

    try:
        if clock is not None:
            clock_seconds(clock)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    return clock


def _checked_status(status: str | None) -> str | None:
    check_choice("--status", status, STATUSES)
    return status


@flags_class
class SelectionFlags:
    """Options that select stored rollouts, for `ls`, `stats` and `export`."""

    status: Annotated[
        str | None,
        typer.Option(metavar="STATUS", callback=_checked_status, help=f"Only this status: {', '.join(STATUSES)}."),
    ] = None
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only rollouts of this task.")] = None
    agent: Annotated[str | None, typer.Option(metavar="AGENT", help="Only rollouts of this agent.")] = None
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Only rollouts of this model.")] = None
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Only rollouts of this group.")] = None
    since: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="Only rollouts stored since: 90s, 30m, 2h, 3d, 1w ago, or a date such as 2026-11-16T08:30.",
        ),
    ] = None
    min_trust: Annotated[
        str | None,
        typer.Option(
            metavar="TRUST",
            callback=checked_trust,
            help=f"Only rewards with at least this level of trust: {', '.join(TRUSTS)}.",
        ),
    ] = None
    min_reward: Annotated[
        float | None, typer.Option(metavar="REWARD", help="Only rollouts with at least this reward.")
    ] = None
    verdict: Verdict = "first"

    def filter(self, store: RolloutStore) -> RolloutFilter:
        """Return the filter for a store, which resolves the verdict's name."""
        from openenv.rollout.store.rollout_index import RolloutFilter

        return RolloutFilter(
            status=self.status,
            task_id=self.task,
            agent=self.agent,
            model=self.model,
            group=self.group,
            # Resolved once, so that all rows of one command are compared with the same time.
            since=None if self.since is None else _time_of(self.since, now=time.time()),
            min_trust=cast("Trust | None", self.min_trust),
            min_reward=self.min_reward,
            verdict=store.resolve_verdict(self.verdict),
        )

    def described(self) -> str:
        """Return the filters that are set, for the message about an empty list: `, status 'ok', agent 'noop'`."""
        # Sample: `No rollouts in runs, status 'ok', since '2h'.` The user sees which filter was too strict.
        filters = {name: getattr(self, name) for name in ("status", "task", "agent", "model", "group", "since")}
        filters |= {"min. trust": self.min_trust, "min. reward": self.min_reward}
        filters |= {"verdict": None if self.verdict == "first" else self.verdict}
        return "".join(f", {name} {value!r}" for name, value in filters.items() if value is not None)


def _time_of(text: str, now: float) -> float:
    """Return the time of `2h` (ago), or of a date in local time.

    Raises:
        BadParameter: The text is neither.
    """
    # 2h, 1.5d: a number and one letter. Anything else is read as a date: 2026-11-16, 2026-11-16T08:30.
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS and number.replace(".", "", 1).isdigit():
        return now - float(number) * _UNITS[unit]
    try:
        # A date without a zone means local time, as the user's clock shows it.
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time; use 90s, 30m, 2h, 3d, 1w (ago), or a date such as 2026-11-16",
            param_hint="--since",
        ) from None


@contextmanager
def open_store(store: Path | None, *, create: bool = False) -> Iterator[RolloutStore]:
    """Open the store; only `run` and `import` create one, because a mistyped path is not an empty store."""
    from openenv.rollout.store.store import RolloutStore

    # The failures inside the block count as well, such as an ambiguous prefix of an ID.
    with one_line_failures(), RolloutStore(store or settings.rollout_store(), create=create) as opened:
        yield opened


@contextmanager
def one_line_failures() -> Iterator[None]:
    """End the command with one line if our errors are raised."""
    try:
        yield
    # ValueError: a malformed task file or contradicting options. Other exceptions are bugs and reach `main`.
    except (OpenEnvError, ValueError) as exc:
        raise failure(exc) from None


# `-` is not 0: without a reward the rollout does not count in any mean.
def reward_text(reward: float | None, reason: str | None = None) -> str:
    """Write a reward; without one, write `-` and the reason."""
    if reward is not None:
        return f"{reward:g}"
    return f"- ({printable(reason)})" if reason else "-"


def print_table(table: object) -> None:
    """Print a rich table; without a terminal, print whole lines for the program that reads them."""
    from rich.console import Console  # other commands do not need it

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    console.print(table, highlight=False)


def print_exclusions(excluded: Sequence[list[str]]) -> None:
    """Warn about rollouts that trainers will not use, on standard error."""
    # Sample:
    #
    #   warning: 2 rollouts are excluded from training: the endpoint gives no log-probabilities
    counts = Counter(reason for reasons in excluded for reason in reasons)
    for reason, count in counts.most_common():
        those = "1 rollout is" if count == 1 else f"{count} rollouts are"
        typer.secho(f"warning: {those} excluded from training: {printable(reason)}", fg="yellow", err=True)


def print_outcomes(outcomes: list[Outcome], *, as_json: bool) -> None:
    """Print a line for each rollout, or all of them as JSON."""
    if as_json:
        typer.echo(json.dumps([outcome.model_dump(mode="json") for outcome in outcomes], indent=2))
        return
    # Sample:
    #
    #   3f2a91c0  ok  reward 1
    #   77b0d4e1  sandbox_failed  reward -  (setup: ...)
    for outcome in outcomes:
        why = f"  ({outcome.phase}: {outcome.reason})" if outcome.reason else ""
        typer.echo(printable(f"{outcome.rollout_id}  {outcome.status}  reward {reward_text(outcome.reward)}{why}"))
