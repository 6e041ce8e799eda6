"""`openenv rollouts reverify` and `lint`: new verdicts on stored work trees, and levels of trust of tasks."""

from __future__ import annotations

import json
import secrets
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..command import printable
from ..options import flags_class, options_of
from ..sandboxes import Sandbox
from .selection import TASKS_HELP, DrawFlags, Json, Store, checked_trust, one_line_failures, open_store, print_outcomes

if TYPE_CHECKING:
    from openenv.rollout.tasks.task import Task, Trust
    from openenv.rollout.verify.lint import TrustReading

# Green: the agent's code cannot influence the decision. Yellow: it can. Red stays for failures.
_COLORS = {"judged": "green", "isolated": "cyan", "shared": "yellow"}


@flags_class
class ReverifyFlags:
    """Options of `openenv rollouts reverify`."""

    rollout_ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="The rollouts; unique prefixes of their IDs are enough.")
    ]
    line: Annotated[
        list[str],
        typer.Option("--verify", metavar="LINE", help="A verify line or JSON check instead of the task's; repeatable."),
    ] = field(default_factory=list)
    task: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use the verification of this task file instead.")
    ] = None
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The verdict's name; by default a new ID, shared by all rollouts."),
    ] = None
    sandbox: Sandbox = "local"
    store: Store = None
    as_json: Json = False


@options_of(ReverifyFlags)
def verify_again(flags: ReverifyFlags) -> None:
    """Run verify lines on stored work trees, without a model, and add the verdict.

    `ls`, `show`, `stats` and `export` still report the first verdict. With --verdict NAME, or --verdict last, they
    report the new one.

    Examples:

      openenv rollouts reverify 3f2a 77b0
      openenv rollouts reverify 3f2a --verify 'python3 -m pytest -q' --name stricter
      openenv rollouts export stricter.parquet --verdict stricter
    """
    from openenv.rollout.run.reverify import reverify
    from openenv.rollout.tasks.task import load_task, parse_check

    with open_store(flags.store) as store:
        # The checks come from --verify, else from the task file, else from the stored task.
        task = None if flags.task is None else load_task(flags.task)
        checks = [parse_check(text) for text in flags.line] or None
        # One name for all rollouts of this call, so that `--verdict NAME` selects the whole new series.
        verdict = flags.name or secrets.token_hex(4)
        outcomes = [
            reverify(store, rollout_id, lines=checks, task=task, verdict=verdict, sandbox=flags.sandbox)
            for rollout_id in flags.rollout_ids
        ]
        print_outcomes(outcomes, as_json=flags.as_json)
        # On standard error: with --json, standard output contains only JSON.
        typer.echo(f"Stored as the verdict {verdict}; report it with --verdict {verdict}.", err=True)


@flags_class
class LintFlags:
    """Options of `openenv rollouts lint`."""

    tasks: Annotated[list[Path], typer.Argument(metavar="TASK...", help=TASKS_HELP)]
    draw: DrawFlags
    min_trust: Annotated[
        str | None,
        typer.Option(
            metavar="TRUST",
            callback=checked_trust,
            help="Exit with 1 if a check is weaker: shared, isolated, judged.",
        ),
    ] = None
    as_json: Json = False


@options_of(LintFlags)
def lint(flags: LintFlags) -> None:
    """Show how far the rewards of tasks can be trusted, and how to strengthen weak checks.

    Runs nothing. Each check has one of these levels:

      judged     the agent's code runs in one sandbox, another sandbox judges
                 its output: the code cannot influence the decision
      isolated   a plain line that runs none of the agent's code, such as
                 grep -qx 42 answer.txt
      shared     the agent's code may run in the process that decides, as with
                 pytest: malicious code can decide

    A line with an unclear effect is shared. If the same check can be derived in judged form, lint prints it as YAML
    for the task file. A task with `min_trust: judged` is refused at run time if it has a weaker check.

      openenv rollouts lint tasks/*.yaml
      openenv rollouts lint task.yaml --min-trust isolated --json
    """
    from openenv.rollout.tasks.task import reaches
    from openenv.rollout.verify.lint import read_task

    with one_line_failures():
        places = flags.draw.load(flags.tasks)
    loaded = [task for _, task in places]
    readings = [read_task(task) for task in loaded]
    if flags.as_json:
        both = zip(loaded, [path for path, _ in places], readings, strict=True)
        typer.echo(json.dumps([_lint_document(task, path, each) for task, path, each in both], indent=2))
    else:
        for task, each in zip(loaded, readings, strict=True):
            _print_lint(task, each)
    # After everything was printed: the user sees all weak checks of all tasks at once, and CI gets exit code 1.
    for task, each in zip(loaded, readings, strict=True):
        minimum = cast("Trust | None", flags.min_trust) or task.min_trust
        if minimum is not None and not all(reaches(reading.trust, minimum) for reading in each):
            raise typer.Exit(1)


def _print_lint(task: Task, readings: tuple[TrustReading, ...]) -> None:
    import yaml

    from openenv.rollout.tasks.task import weakest
    from openenv.rollout.verify.lint import ADVICE

    # Sample:
    #
    #   maze: shared
    #     1  isolated   grep -qx 42 answer.txt
    #     2  shared     python3 -m pytest -q
    #                   ...the reason...
    #                   as a check:
    #                     - run: ...
    #                       judge: ...
    #
    # A task is as trustworthy as its weakest check.
    trust = weakest(reading.trust for reading in readings)
    label = "no checks" if trust is None else typer.style(trust, fg=_COLORS[trust])
    typer.echo(f"{printable(task.task_id or 'task')}: {label}")
    for number, reading in enumerate(readings, 1):
        mark = typer.style(f"{reading.trust:9}", fg=_COLORS[reading.trust])
        typer.echo(f"  {number}  {mark}  {printable(reading.check)}")
        if reading.trust != "shared":
            continue
        typer.echo(f"                {printable(reading.reason)}")
        # Only plain lines can be rewritten; a JSON check was written by hand and gets no general advice.
        if reading.suggestion is None:
            if isinstance(reading.check, str):
                typer.echo(f"                {ADVICE}")
            continue
        # A large width, because YAML would break a long command into several lines.
        lines = yaml.safe_dump(dict(reading.suggestion), sort_keys=False, width=10_000, allow_unicode=True)
        typer.echo("                as a check:")
        for index, text in enumerate(lines.splitlines()):
            typer.echo(f"                  {'- ' if index == 0 else '  '}{printable(text)}")


def _lint_document(task: Task, path: Path, readings: tuple[TrustReading, ...]) -> dict[str, object]:
    from openenv.rollout.tasks.task import weakest

    return {
        "task_id": task.task_id,
        "file": str(path),
        "trust": weakest(reading.trust for reading in readings),
        "min_trust": task.min_trust,
        "checks": [
            {
                "check": reading.check if isinstance(reading.check, str) else reading.check.model_dump(mode="json"),
                "trust": reading.trust,
                "reason": reading.reason,
                "suggestion": None if reading.suggestion is None else dict(reading.suggestion),
            }
            for reading in readings
        ],
    }
