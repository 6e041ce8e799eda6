"""`openenv rollouts run` and `tasks`: run an agent on tasks and store the outcomes; list task sets and their tasks."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..command import OldName, printable
from ..model_flags import ModelFlags
from ..options import flags_class, options_of
from ..sandboxes import import_from_here
from .selection import (
    TASKS_HELP,
    DrawFlags,
    Json,
    Store,
    checked_clock,
    checked_trust,
    one_line_failures,
    open_store,
    print_exclusions,
    print_outcomes,
    print_table,
    reward_text,
)

if TYPE_CHECKING:
    from openenv.rollout.progress import Progress
    from openenv.rollout.store.outcome import Outcome
    from openenv.rollout.store.store import RolloutStore
    from openenv.rollout.tasks.task import Task, Trust


# One command, many rollouts:
#
#   rollouts run ──> run_many ──> engine ──> sandbox: setup, agent ──model calls──> capture proxy ──> endpoint
#        │            (threads,                │
#        │             or --ray workers)       └──> verifier: reward ──> store ──> openenv rollouts show, view
#        │
#        └── progress on standard error, outcomes on standard output
@flags_class
class RunFlags:
    """Options of `openenv rollouts run`."""

    tasks: Annotated[list[Path], typer.Argument(metavar="TASK...", help=TASKS_HELP)]
    draw: DrawFlags
    agent: Annotated[str, typer.Option(metavar="AGENT", help="The agent; a version may follow after @.")] = "opencode"
    model: ModelFlags
    samples: Annotated[
        int,
        typer.Option("--samples", OldName("--repeat"), metavar="N", min=1, help="How often to run each task."),
    ] = 1
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Parallel rollouts; by default 1, with --ray one per free CPU."),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on the nodes of a Ray cluster: HOST:PORT of its head, or auto for this machine's cluster.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Repeatable: derive the seed of each model call from this number."),
    ] = None
    clock: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            callback=checked_clock,
            help="The time that the agent's commands see, such as '2026-01-01 12:00', in UTC.",
        ),
    ] = None
    record_files: Annotated[
        bool,
        typer.Option(
            "--record-files", help="Record the agent's files before each model call: branches then start from them."
        ),
    ] = False
    no_share_setup: Annotated[
        bool, typer.Option("--no-share-setup", help="Run the setup for each rollout, even if several have the same.")
    ] = False
    sandbox: Annotated[
        str | None,
        typer.Option(
            metavar="BACKEND",
            callback=import_from_here,
            help="Where commands run: local, docker, kubernetes, e2b, or module:Class. By default local, or docker if "
            "a task has an image.",
        ),
    ] = None
    min_trust: Annotated[
        str | None,
        typer.Option(
            metavar="TRUST",
            callback=checked_trust,
            help="Refuse tasks with a weaker check: shared, isolated, judged.",
        ),
    ] = None
    store: Store = None
    as_json: Json = False


@options_of(RunFlags)
def run(flags: RunFlags) -> None:
    """Run tasks, store their outcomes and print them.

    Exits with 1 if the infrastructure (not the agent) failed in a rollout. A task is a file such as

      instruction: Write the word hello into greeting.txt.
      verify:
        - grep -qx hello greeting.txt

    Task sets need no files; `openenv rollouts tasks` lists them:

      openenv rollouts run sudoku --tasks 20 --agent oracle

    A folder of Harbor's tasks, such as Terminal-Bench, runs in containers:

      openenv rollouts run harbor:tasks/hello --agent oracle

    To try it without a real model, serve a scripted one in another terminal:

      python -m openenv.testing.scripted opencode:binary_search --port 8001
      openenv rollouts run task.yaml --llm-url http://localhost:8001/v1 \\
          --model scripted/binary_search
    """
    from openenv.providers.ray_cluster import RayCluster
    from openenv.rollout.agents.base import agent as driver
    from openenv.rollout.capture.endpoint_check import check_endpoint
    from openenv.rollout.run.batch import run_many

    # Everything that can be wrong with the command line is found in this block, before the store is created.
    with one_line_failures():
        tasks = [each for _, task in flags.draw.load(flags.tasks) for each in _repeated(task, flags.samples)]
        sandbox = flags.sandbox or ("docker" if any(task.image is not None for task in tasks) else "local")
        endpoint = flags.model.endpoint()
        needs_model = driver(flags.agent).dialect is not None  # noop and oracle make no model calls
        if endpoint is None and needs_model:
            raise ValueError(f"{flags.agent} needs a model: give its endpoint with --llm-url and its id with --model")
        cluster = None if flags.ray is None else RayCluster(flags.ray)
        # Before an agent is downloaded. The nodes of a cluster may reach endpoints that this machine does not.
        if endpoint is not None and needs_model and cluster is None:
            check_endpoint(endpoint)
    with open_store(flags.store, create=True) as store:
        outcomes = run_many(
            tasks,
            agent=flags.agent,
            sandbox=sandbox,
            model=endpoint,
            store=store,
            min_trust=cast("Trust | None", flags.min_trust),
            # One at a time here by default; None lets a cluster run one per free CPU.
            concurrency=flags.concurrency or (1 if cluster is None else None),
            on=cluster,
            share_setup=not flags.no_share_setup,
            seed=flags.seed,
            clock=flags.clock,
            record_files=flags.record_files,
            on_progress=print_progress,
            on_outcome=countdown(len(tasks)),
            on_install=lambda message: typer.echo(message, err=True),
        )
        report(outcomes, as_json=flags.as_json, excluded=_excluded(store, outcomes))


def _excluded(store: RolloutStore, outcomes: list[Outcome]) -> list[list[str]]:
    """Return the reasons of each rollout with a reward that trainers will not use."""
    from openenv.rollout.capture.export import exclusions
    from openenv.rollout.store.exports import recording

    rewarded = [outcome for outcome in outcomes if outcome.reward is not None]
    recordings = (recording(store, store.get(outcome.rollout_id)) for outcome in rewarded)
    return [reasons for each in recordings if each is not None and each.calls and (reasons := exclusions(each))]


@flags_class
class TasksFlags:
    """Options of `openenv rollouts tasks`."""

    tasks: Annotated[list[Path], typer.Argument(metavar="[TASK...]", help=TASKS_HELP)] = field(default_factory=list)
    draw: DrawFlags
    as_json: Json = False


@options_of(TasksFlags)
def list_tasks(flags: TasksFlags) -> None:
    """List the task sets, or print tasks of sets and files.

    A task set draws as many tasks as you want; the same seed gives the same tasks. Solutions and hidden files are in
    the output of --json only.

    Examples:

      openenv rollouts tasks
      openenv rollouts tasks sudoku git --tasks 2 --task-seed 7
    """
    with one_line_failures():
        if flags.tasks:
            _print_tasks([task for _, task in flags.draw.load(flags.tasks)], as_json=flags.as_json)
        else:
            _print_sets(as_json=flags.as_json)


def _print_sets(*, as_json: bool) -> None:
    from openenv.rollout.tasks.task_sets import task_set, task_set_names

    sets = [task_set(name) for name in task_set_names()]
    if as_json:
        names = ("name", "trust", "needs", "description")
        typer.echo(json.dumps([{name: getattr(each, name) for name in names} for each in sets], indent=2))
        return
    # Sample:
    #
    #   NAME        TRUST     NEEDS  EACH TASK
    #   arithmetic  isolated         the value of an expression with 2 to 5 integers
    #   git         isolated  git    a commit or a lost text in a git history
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("NAME", "TRUST", "NEEDS", "EACH TASK"):
        table.add_column(column, no_wrap=column != "EACH TASK")
    for each in sets:
        # `Text`: rich would read brackets as styles.
        table.add_row(*map(Text, (each.name, each.trust, ", ".join(each.needs), each.description)))
    print_table(table)


def _print_tasks(tasks: list[Task], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([task.model_dump(mode="json", exclude_defaults=True) for task in tasks], indent=2))
        return
    for task in tasks:
        typer.echo(typer.style(printable(task.task_id or "task"), bold=True))
        # Instructions come from files of others and may have control characters; `printable` keeps none.
        for line in task.instruction.strip().splitlines():
            typer.echo(f"  {printable(line)}")


def report(outcomes: list[Outcome], *, as_json: bool, excluded: Sequence[list[str]] = ()) -> None:
    """Print outcomes; exit with 1 if the infrastructure failed in one of them."""
    print_exclusions(excluded)
    print_outcomes(outcomes, as_json=as_json)
    # A failed verifier may still leave a reward from the checks before it; then the rollout counts.
    # env_failed, sandbox_failed and grader_failed. policy_failed has a reward, so it does not count here.
    if any(outcome.status.endswith("_failed") and outcome.reward is None for outcome in outcomes):
        raise typer.Exit(1)


def _repeated(task: Task, count: int) -> list[Task]:
    """Return a task `count` times; the repetitions form a group, unless the task names one."""
    if count > 1 and "group" not in task.metadata:
        # A group is one unit for training algorithms that compare samples of the same task.
        group = f"{task.task_id or 'task'}-{secrets.token_hex(4)}"
        task = task.model_copy(update={"metadata": {**task.metadata, "group": group}})
    return [task] * count


def print_progress(event: Progress) -> None:
    """Print an event on standard error."""
    # Sample:
    #
    #   3f2a91c0    12.4 s  agent    turn 3
    line = f"{event.rollout_id} {event.elapsed_s:7.1f} s  {event.phase:8} {event.message}"
    typer.echo(printable(line), err=True)


def countdown(count: int) -> Callable[[int, Outcome], None]:
    """Return a callback that prints after each of several rollouts how many are done."""
    done = itertools.count(1)

    def show(number: int, outcome: Outcome) -> None:
        if count > 1:
            # Sample: `3f2a91c0 2 of 8 done: ok, reward 1`. A single rollout needs no count.
            line = f"{next(done)} of {count} done: {outcome.status}, reward {reward_text(outcome.reward)}"
            typer.echo(f"{outcome.rollout_id} {line}", err=True)

    return show
