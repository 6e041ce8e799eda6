"""`openenv rollouts`: run and lint tasks; list, show, export and re-verify stored rollouts; cheats."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

import typer

from openenv import settings
from openenv.errors import OpenEnvError

from .command import HelpCommand, check_choice, command_group, failure, printable
from .sandboxes import import_from_here

if TYPE_CHECKING:
    from rich.table import Table

    from openenv.rollout.store.outcome import Outcome, Progress
    from openenv.rollout.store.rollout_index import Grouping, RolloutFilter, RolloutRow, RolloutStats
    from openenv.rollout.store.store import Format, Record, RolloutStore
    from openenv.rollout.tasks.commands import CommandResult
    from openenv.rollout.tasks.task import Model, Task
    from openenv.rollout.tasks.trust_levels import Trust
    from openenv.rollout.verify.lint import TrustReading
    from openenv.testing.cheats import Cheat, CheatReport, CheatResult

_EXAMPLES = """
Run agents on tasks; lint tasks; list, show, count, export and re-verify stored rollouts.

  openenv rollouts lint task.yaml
  openenv rollouts run task.yaml --base-url URL --model MODEL
  openenv rollouts ls --since 2h
  openenv rollouts stats --by model
  openenv rollouts export good.parquet --status ok
"""

rollouts = command_group(_EXAMPLES)

STATUSES = ("ok", "policy_failed", "truncated", "env_failed", "sandbox_failed", "grader_failed", "cancelled")
"""Those of `openenv.rollout.store.outcome`, which is not loaded to show help."""


TRUSTS = ("shared", "isolated", "judged")
"""Those of `openenv.rollout.verify.trust`."""
FORMATS = ("jsonl", "parquet", "inspect")
_GROUPINGS: Final[dict[str, Grouping]] = {
    "task": "task_id",
    "group": "group",
    "agent": "agent",
    "model": "model",
    "status": "status",
    "verdict": "verdict",
}


def _known_status(status: str | None) -> str | None:
    check_choice("--status", status, STATUSES)
    return status


def _known_trust(trust: str | None) -> str | None:
    check_choice("--min-trust", trust, TRUSTS)
    return trust


def _known_format(kind: str | None) -> str | None:
    check_choice("--to", kind, FORMATS)
    return kind


def _known_grouping(by: str) -> str:
    check_choice("--by", by, tuple(_GROUPINGS))
    return by


_STORE = typer.Option(
    None,
    "--store",
    metavar="FOLDER",
    help="The folder of stored rollouts; by default OPENENV_ROLLOUTS, else one in your data folder.",
)
_JSON = typer.Option(False, "--json", help="Print JSON.")
_SANDBOX = typer.Option(
    "local",
    "--sandbox",
    metavar="BACKEND",
    callback=import_from_here,
    help="Where commands run: local, docker, kubernetes, e2b, daytona, or module:Class.",
)
_STATUS = typer.Option(
    None,
    "--status",
    metavar="STATUS",
    callback=_known_status,
    help=f"Only those with this status: {', '.join(STATUSES)}.",
)
_TASK = typer.Option(None, "--task", metavar="ID", help="Only those of this task.")
_AGENT = typer.Option(None, "--agent", metavar="AGENT", help="Only those of this agent.")
_MODEL = typer.Option(None, "--model", metavar="MODEL", help="Only those of this model.")
_GROUP = typer.Option(None, "--group", metavar="GROUP", help="Only those of this group.")
_SINCE = typer.Option(
    None,
    "--since",
    metavar="WHEN",
    help="Only those stored since then: 90s, 30m, 2h, 3d, 1w ago, or a date such as 2026-11-16T08:30.",
)
_VERDICT = typer.Option(
    "first",
    "--verdict",
    metavar="VERDICT",
    help="Which verdict to report: first, the one of the rollout itself; last; or the name of a later one.",
)
_MIN_TRUST = typer.Option(
    None,
    "--min-trust",
    metavar="TRUST",
    callback=_known_trust,
    help=f"Only those whose reward can be trusted so far: {', '.join(TRUSTS)}.",
)
_TASKS_HELP = "Task files, YAML or JSON; folders of them; or harbor:FOLDER for Harbor's tasks."
_OUTPUT_LINES = 20
_PIPED_WIDTH = 400


@rollouts.command("run", cls=HelpCommand)
def run(
    tasks: list[Path] = typer.Argument(..., metavar="TASK...", help=_TASKS_HELP),
    agent: str = typer.Option("opencode", metavar="AGENT", help="The agent; a version may follow after @."),
    base_url: str | None = typer.Option(None, metavar="URL", help="The model's endpoint, ending in /v1."),
    model: str | None = typer.Option(None, metavar="MODEL", help="The model's id at that endpoint."),
    api_key: str | None = typer.Option(
        None,
        metavar="KEY",
        help="The endpoint's key. Better set OPENENV_MODEL_KEY, which others on this machine cannot see.",
    ),
    sampling: str | None = typer.Option(
        None, metavar="JSON", help='How the model samples, whatever the agent asks for: {"temperature": 1.0}.'
    ),
    repeat: int = typer.Option(1, metavar="N", min=1, help="How often to run each task."),
    concurrency: int | None = typer.Option(
        None, metavar="N", min=1, help="How many run at once; by default 1, with --ray one per free processor."
    ),
    ray: str | None = typer.Option(
        None,
        "--ray",
        metavar="ADDRESS",
        help="Run them on the nodes of a Ray cluster: HOST:PORT of its head, or auto for the one that this machine "
        "belongs to.",
    ),
    no_share_setup: bool = typer.Option(
        False, "--no-share-setup", help="Run the setup for each rollout, also where it is the same."
    ),
    sandbox: str | None = typer.Option(
        None,
        "--sandbox",
        metavar="BACKEND",
        callback=import_from_here,
        help="Where commands run: local, docker, kubernetes, e2b, or module:Class. By default local, or docker where "
        "a task names an image.",
    ),
    min_trust: str | None = typer.Option(
        None,
        "--min-trust",
        metavar="TRUST",
        callback=_known_trust,
        help="Refuse tasks with a check that can be trusted less: shared, isolated, judged.",
    ),
    store: Path | None = _STORE,
    as_json: bool = _JSON,
) -> None:
    """Run tasks, store their outcomes and print them.

    Exits with 1 if infrastructure (not the agent) failed in one of them. A task is a file such as

      instruction: Write the word hello into greeting.txt.
      verify:
        - grep -qx hello greeting.txt

    A folder of Harbor's, such as one of Terminal-Bench, runs in containers:

      openenv rollouts run harbor:tasks/hello --agent oracle

    To try it without a real model, serve a scripted one in another terminal:

      python -m openenv.testing.scripted opencode:binary_search --port 8001
      openenv rollouts run task.yaml --base-url http://localhost:8001/v1 \\
          --model scripted/binary_search
    """
    from openenv.providers.ray_cluster import RayCluster
    from openenv.rollout.agents.base import agent as driver
    from openenv.rollout.capture.endpoint_check import check_endpoint
    from openenv.rollout.run.batch import run_many
    from openenv.rollout.tasks.task_folders import load_tasks

    with _failures():
        loaded = [each for path in tasks for task in load_tasks(path) for each in _repeated(task, repeat)]
        sandbox = sandbox or ("docker" if any(task.image is not None for task in loaded) else "local")
        endpoint = endpoint_model(base_url, model, api_key or settings.model_key(), sampling)
        needs_model = driver(agent).dialect is not None
        if endpoint is None and needs_model:
            raise ValueError(f"{agent} needs a model: give its endpoint with --base-url and its id with --model")
        cluster = None if ray is None else RayCluster(ray)
        # Before an agent is downloaded and a rollout fails. What the nodes of a cluster reach is not known here.
        if endpoint is not None and needs_model and cluster is None:
            check_endpoint(endpoint)
    with _opened(store, create=True) as opened:
        outcomes = run_many(
            loaded,
            agent=agent,
            sandbox=sandbox,
            model=endpoint,
            store=opened,
            min_trust=cast("Trust | None", min_trust),
            concurrency=concurrency or (1 if cluster is None else None),
            on=cluster,
            share_setup=not no_share_setup,
            on_progress=_print_progress,
            on_outcome=_countdown(len(loaded)),
            on_install=lambda message: typer.echo(message, err=True),
        )
        _print_outcomes(outcomes, as_json=as_json)
        if any(outcome.status.endswith("_failed") and outcome.reward is None for outcome in outcomes):
            raise typer.Exit(1)


@rollouts.command("ls", cls=HelpCommand)
def list_rollouts(
    store: Path | None = _STORE,
    status: str | None = _STATUS,
    task: str | None = _TASK,
    agent: str | None = _AGENT,
    model: str | None = _MODEL,
    group: str | None = _GROUP,
    since: str | None = _SINCE,
    min_trust: str | None = _MIN_TRUST,
    verdict: str = _VERDICT,
    limit: int = typer.Option(50, metavar="N", min=1, help="How many to list at most, newest first."),
    as_json: bool = _JSON,
) -> None:
    """List stored rollouts, newest first.

    Examples:

      openenv rollouts ls --status ok --limit 5
      openenv rollouts ls --task binary_search --since 2h --json
    """
    if store is None and not settings.rollout_store().exists():
        nothing: dict[str, list[object]] = {"rollouts": [], "interrupted": []}
        typer.echo(json.dumps(nothing, indent=2) if as_json else f"No rollouts yet in {settings.rollout_store()}.")
        return
    with _opened(store) as opened:
        filters = {"status": status, "task": task, "agent": agent, "model": model, "group": group, "since": since}
        where = _filter(opened, **filters, min_trust=min_trust, verdict=verdict)
        rows = opened.find(where, limit=limit)
        lost = opened.interrupted()
        if as_json:
            typer.echo(json.dumps({"rollouts": [_row_document(row) for row in rows], "interrupted": lost}, indent=2))
            return
        if not rows:
            filters |= {"min. trust": min_trust, "verdict": None if verdict == "first" else verdict}
            of = "".join(f", {name} {value!r}" for name, value in filters.items() if value is not None)
            typer.echo(f"No rollouts in {opened.root}{of}.")
        else:
            _print(_rows_table(rows, now=time.time()))
        if lost:
            typer.echo(f"{len(lost)} more were interrupted with their engine: {', '.join(lost[:5])}")


@rollouts.command("show", cls=HelpCommand)
def show_rollout(
    rollout_id: str = typer.Argument(..., metavar="ID", help="The rollout; the beginning of its id will do."),
    store: Path | None = _STORE,
    verdict: str = _VERDICT,
    tokens: bool = typer.Option(
        False, "--tokens", help="Show the sampled tokens: green is likely, red is not, dim is not in the loss."
    ),
    full: bool = typer.Option(False, "--full", help="Show long texts and changes to their end."),
    as_json: bool = _JSON,
) -> None:
    """Show one rollout: status, reward, every check, the transcript, and what the agent changed.

    `openenv view` shows the same in the browser.

    Examples:

      openenv rollouts show 3f2a
      openenv rollouts show 3f2a --tokens --full
      openenv rollouts show 3f2a --verdict last --json
    """
    with _opened(store) as opened:
        chosen = opened.get(rollout_id, verdict=verdict)
        others = [record for record in opened.history(chosen.rollout_id) if record.record_id != chosen.record_id]
        history = [chosen, *reversed(others)]
        if as_json:
            typer.echo(json.dumps([_record_document(record) for record in history], indent=2))
            return
        _show(history)
        _show_work(opened, chosen, tokens=tokens, full=full)


@rollouts.command("export", cls=HelpCommand)
def export(
    target: Path = typer.Argument(
        ...,
        metavar="FILE",
        help="The file to write; .parquet for training sequences, .eval for a log of Inspect AI, else JSONL.",
    ),
    to: str | None = typer.Option(
        None,
        "--to",
        metavar="FORMAT",
        callback=_known_format,
        help=f"The format, whatever the file's name ends in: {', '.join(FORMATS)}.",
    ),
    store: Path | None = _STORE,
    status: str | None = _STATUS,
    task: str | None = _TASK,
    agent: str | None = _AGENT,
    model: str | None = _MODEL,
    group: str | None = _GROUP,
    since: str | None = _SINCE,
    min_trust: str | None = _MIN_TRUST,
    verdict: str = _VERDICT,
    messages: bool = typer.Option(False, "--messages", help="Include whole requests and responses (JSONL)."),
) -> None:
    """Write rollouts, with their tokens and log-probabilities, to a file.

    Task, group, agent, model, status, reward, trust and verdict are top-level keys, or columns. A log of Inspect AI has
    one agent and one model; where there are several, --to inspect writes a log for each into a folder.

    Examples:

      openenv rollouts export all.jsonl --messages
      openenv rollouts export good.parquet --status ok --min-trust judged
      openenv rollouts export logs --to inspect && inspect view --log-dir logs
    """
    from openenv.rollout.store.store import export_rollouts

    kind = to or {".parquet": "parquet", ".eval": "inspect"}.get(target.suffix, "jsonl")
    if messages and kind != "jsonl":
        raise failure(f"--messages is for JSONL: {kind} has its own form of them")

    with _opened(store) as opened:
        filters = {"status": status, "task": task, "agent": agent, "model": model, "group": group, "since": since}
        where = _filter(opened, **filters, min_trust=min_trust, verdict=verdict)
        if kind == "inspect":
            count = _inspect_logs().write_inspect_logs(opened, target, where)
        else:
            count = export_rollouts(opened, target, kind=cast("Format", kind), messages=messages, where=where)
        what = "row" if kind == "parquet" else "rollout"
        typer.echo(f"{count} {what}{'' if count == 1 else 's'} in {target}")


@rollouts.command("import", cls=HelpCommand)
def import_logs(
    logs: list[Path] = typer.Argument(..., metavar="LOG...", help="Logs of Inspect AI: .eval or .json."),
    scorer: str | None = typer.Option(
        None, "--scorer", metavar="NAME", help="Which score is the reward; by default the first of each sample."
    ),
    store: Path | None = _STORE,
) -> None:
    """Add the samples of Inspect AI's logs as rollouts; `openenv view` shows them.

    An error in Inspect is a rollout without a reward, not one with a reward of 0. Samples that are stored already are
    left out, so a log can be imported again.

    Examples:

      openenv rollouts import logs/2026-11-17T05-23-13_served-env.eval
      openenv rollouts import logs/*.eval --scorer includes
    """
    module = _inspect_logs()
    with _opened(store, create=True) as opened:
        for log in logs:
            done = module.import_inspect_log(log, opened, scorer=scorer)
            known = f", {done.known} known already" if done.known else ""
            typer.echo(f"{log}: {done.added} rollout{'' if done.added == 1 else 's'} added{known}")


def _inspect_logs() -> ModuleType:
    """Return what reads and writes Inspect's logs; inspect-ai is an extra."""
    try:
        from openenv.adapters.inspect import logs as inspect_logs
    except ModuleNotFoundError as exc:
        raise failure(str(exc)) from exc
    return inspect_logs


@rollouts.command("stats", cls=HelpCommand)
def show_stats(
    by: str = typer.Option(
        "task", "--by", metavar="COLUMN", help=f"What to tell apart: {', '.join(_GROUPINGS)}.", callback=_known_grouping
    ),
    store: Path | None = _STORE,
    status: str | None = _STATUS,
    task: str | None = _TASK,
    agent: str | None = _AGENT,
    model: str | None = _MODEL,
    group: str | None = _GROUP,
    since: str | None = _SINCE,
    min_trust: str | None = _MIN_TRUST,
    verdict: str = _VERDICT,
    as_json: bool = _JSON,
) -> None:
    """Show pass rates and mean rewards with their spread, turns and seconds, by task, agent or model.

    A rollout passes with a reward of 1. Those without a reward, whose infrastructure failed, count as rollouts only.
    Behind the pass rate is the interval in which it lies with 95 % confidence.

    Examples:

      openenv rollouts stats --since 1d
      openenv rollouts stats --by model --task binary_search
    """
    with _opened(store) as opened:
        filters = {"status": status, "task": task, "agent": agent, "model": model, "group": group, "since": since}
        where = _filter(opened, **filters, min_trust=min_trust, verdict=verdict)
        figures = opened.stats(where, by=_GROUPINGS[by])
        whole = opened.stats(where)
    if as_json:
        total = _stats_document(whole[0]) if whole else None
        typer.echo(json.dumps({"by": by, "rows": [_stats_document(each) for each in figures], "all": total}, indent=2))
    elif not figures:
        typer.echo("No such rollouts.")
    else:
        _print(_stats_table(by, figures, whole[0] if len(figures) > 1 else None))


@rollouts.command("reverify", cls=HelpCommand)
def verify_again(
    rollout_ids: list[str] = typer.Argument(
        ..., metavar="ID...", help="Which rollouts; the beginning of an id will do."
    ),
    line: list[str] = typer.Option(
        [],
        "--verify",
        metavar="LINE",
        help="A verify line, or a check in JSON, in place of the task's; may be repeated.",
    ),
    task: Path | None = typer.Option(
        None, "--task", metavar="FILE", help="A task file whose verification is used instead."
    ),
    name: str | None = typer.Option(
        None, "--name", metavar="NAME", help="A name for the verdict; by default a new id, the same for all rollouts."
    ),
    sandbox: str = _SANDBOX,
    store: Path | None = _STORE,
    as_json: bool = _JSON,
) -> None:
    """Run verify lines on stored work trees, without a model, and add the verdict.

    The first verdict stays what `ls`, `show`, `stats` and `export` report; with --verdict NAME, or --verdict last, they
    report the new one.

    Examples:

      openenv rollouts reverify 3f2a 77b0
      openenv rollouts reverify 3f2a --verify 'python3 -m pytest -q' --name stricter
      openenv rollouts export stricter.parquet --verdict stricter
    """
    from openenv.rollout.run.reverify import reverify
    from openenv.rollout.tasks.task import load_task, parse_check

    with _opened(store) as opened:
        replacement = None if task is None else load_task(task)
        checks = [parse_check(text) for text in line] or None
        verdict = name or secrets.token_hex(4)
        outcomes = [
            reverify(opened, rollout_id, lines=checks, task=replacement, verdict=verdict, sandbox=sandbox)
            for rollout_id in rollout_ids
        ]
        _print_outcomes(outcomes, as_json=as_json)
        typer.echo(f"Kept as the verdict {verdict}; --verdict {verdict} reports it.", err=True)


@rollouts.command("lint", cls=HelpCommand)
def lint(
    tasks: list[Path] = typer.Argument(..., metavar="TASK...", help=_TASKS_HELP),
    min_trust: str | None = typer.Option(
        None,
        "--min-trust",
        metavar="TRUST",
        callback=_known_trust,
        help="Exit with 1 if a check can be trusted less than this: shared, isolated, judged.",
    ),
    as_json: bool = _JSON,
) -> None:
    """Say how far the reward of tasks can be trusted, and how to write weak checks.

    Nothing is run. Each check is one of

      judged     what the agent wrote runs in one sandbox, its output is judged
                 in another: nothing that its code does reaches the decision
      isolated   a plain line that runs nothing of the agent's, such as
                 grep -qx 42 answer.txt
      shared     the agent's code may run where the decision is made, as under
                 pytest: code that is out to cheat can decide it

    A line that cannot be read for certain is shared. Where the same check can be derived in a form that is judged, it
    is printed as a task file has it. A task with `min_trust: judged` is refused when it is run with a weaker check.

      openenv rollouts lint tasks/*.yaml
      openenv rollouts lint task.yaml --min-trust isolated --json
    """
    from openenv.rollout.tasks.task_folders import load_tasks
    from openenv.rollout.tasks.trust_levels import reaches
    from openenv.rollout.verify.lint import read_task

    with _failures():
        places = [(path, task) for path in tasks for task in load_tasks(path)]
    loaded = [task for _, task in places]
    readings = [read_task(task) for task in loaded]
    if as_json:
        both = zip(loaded, [path for path, _ in places], readings, strict=True)
        typer.echo(json.dumps([_lint_document(task, path, each) for task, path, each in both], indent=2))
    else:
        for task, each in zip(loaded, readings, strict=True):
            _print_lint(task, each)
    for task, each in zip(loaded, readings, strict=True):
        minimum = cast("Trust | None", min_trust) or task.min_trust
        if minimum is not None and not all(reaches(reading.trust, minimum) for reading in each):
            raise typer.Exit(1)


@rollouts.command("cheats", cls=HelpCommand)
def cheats(
    sandbox: str = _SANDBOX,
    name: list[str] = typer.Option([], "--cheat", metavar="ID", help="Only this one; may be repeated."),
    family: list[str] = typer.Option([], "--family", metavar="FAMILY", help="Only this family; may be repeated."),
    quick: bool = typer.Option(False, "--quick", help="A representative half, many to a rollout."),
    show_list: bool = typer.Option(False, "--list", help="Print the cheats and run none."),
    concurrency: int = typer.Option(2, metavar="N", min=1, help="How many run at once."),
    as_json: bool = _JSON,
) -> None:
    """Run agents that cheat: none may earn more than doing nothing earns, or get out of an earned 0.

    A win is more reward than doing nothing earns, or something outside of the sandbox. A dodge is no
    reward where a 0 was earned. Exits with 1 if there is one of either.

      openenv rollouts cheats --quick
      openenv rollouts cheats --sandbox docker --family shadowed-module --json
    """
    from openenv.testing import run_cheats

    with _failures():
        chosen = _chosen_cheats(name, family, quick=quick)
        if show_list:
            _list_cheats(chosen, as_json=as_json)
            return
        with _cheat_progress(len(chosen), visible=not as_json) as on_result:
            report = run_cheats(sandbox, cheats=chosen, concurrency=concurrency, quick=quick, on_result=on_result)
    if as_json:
        typer.echo(json.dumps(report.document(), indent=2))
    else:
        _print_cheats(report)
    if report.succeeded or report.unfit:
        raise typer.Exit(1)


@contextmanager
def _opened(store: Path | None, *, create: bool = False) -> Iterator[RolloutStore]:
    """Open the store; only `run` may create one, since a mistyped path is not an empty store."""
    from openenv.rollout.store.store import RolloutStore

    with _failures(), RolloutStore(store or settings.rollout_store(), create=create) as opened:
        yield opened


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (OpenEnvError, ValueError) as exc:
        raise failure(exc) from None


def _repeated(task: Task, count: int) -> list[Task]:
    """Return a task several times; its repetitions are a group, unless the task names one."""
    if count > 1 and "group" not in task.metadata:
        group = f"{task.task_id or 'task'}-{secrets.token_hex(4)}"
        task = task.model_copy(update={"metadata": {**task.metadata, "group": group}})
    return [task] * count


def _filter(
    store: RolloutStore,
    *,
    status: str | None,
    task: str | None,
    agent: str | None,
    model: str | None,
    group: str | None,
    since: str | None,
    min_trust: str | None,
    verdict: str,
) -> RolloutFilter:
    """Return what the options of a command select."""
    from openenv.rollout.store.rollout_index import RolloutFilter

    return RolloutFilter(
        status=status,
        task_id=task,
        agent=agent,
        model=model,
        group=group,
        since=None if since is None else _time_of(since, now=time.time()),
        min_trust=cast("Trust | None", min_trust),
        verdict=store.resolve_verdict(verdict),
    )


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def _time_of(text: str, now: float) -> float:
    """Read how long ago something was, or a date in local time.

    Raises:
        BadParameter: it is neither.
    """
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS and number.replace(".", "", 1).isdigit():
        return now - float(number) * _UNITS[unit]
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no time: 90s, 30m, 2h, 3d, 1w (ago), or a date such as 2026-11-16", param_hint="--since"
        ) from None


def _age(seconds: float) -> str:
    """Write how long ago something was: 45 s, 12 min, 3 h, 5 d."""
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds / unit))} {word}"
    return f"{int(seconds / 86_400)} d"


def endpoint_model(base_url: str | None, name: str | None, api_key: str | None, sampling: str | None) -> Model | None:
    """Return the model of a command's options; None where none is named.

    Raises:
        ValueError: The options do not fit together.
    """
    from pydantic import ValidationError

    from openenv.rollout.tasks.task import Model

    if base_url is None and name is None:
        return None
    if base_url is None or name is None:
        raise ValueError("--base-url and --model go together")
    fields: dict[str, object] = {"base_url": base_url, "name": name}
    if api_key is not None:
        fields["api_key"] = api_key
    if sampling is not None:
        try:
            fields["sampling"] = json.loads(sampling)
        except ValueError as exc:
            raise ValueError(f"--sampling is not JSON: {exc}") from None
    try:
        return Model.model_validate(fields)
    except ValidationError as exc:
        raise ValueError("; ".join(str(error["msg"]) for error in exc.errors())) from None


def _print_progress(event: Progress) -> None:
    line = f"{event.rollout_id} {event.elapsed_s:7.1f} s  {event.phase:8} {event.message}"
    typer.echo(printable(line), err=True)


def _countdown(count: int) -> Callable[[int, Outcome], None]:
    """Return what prints after each of several rollouts how many are done."""
    done = itertools.count(1)

    def show(number: int, outcome: Outcome) -> None:
        if count > 1:
            line = f"{next(done)} of {count} done: {outcome.status}, reward {_reward(outcome.reward)}"
            typer.echo(f"{outcome.rollout_id} {line}", err=True)

    return show


def _chosen_cheats(names: list[str], families: list[str], *, quick: bool) -> list[Cheat]:
    from openenv.testing import all_cheats

    everything = all_cheats()
    unknown = set(names) - {cheat.name for cheat in everything}
    unknown |= set(families) - {cheat.family for cheat in everything}
    if unknown:
        raise ValueError(f"There is no cheat {', '.join(sorted(unknown))}; --list prints what there is")
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
    _print(table)
    typer.echo(f"{len(chosen)} cheats in {len({cheat.family for cheat in chosen})} families")


@contextmanager
def _cheat_progress(count: int, *, visible: bool) -> Iterator[Callable[[CheatResult], None]]:
    """Show a bar on a terminal; give what takes each result."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task("", total=count)
        yield lambda result: bar.update(task, advance=1, description=result.name)


def _print_cheats(report: CheatReport) -> None:
    from rich.table import Table
    from rich.text import Text

    families: dict[str, list[CheatResult]] = {}
    for result in report.results:
        families.setdefault(result.family, []).append(result)
    table = Table("FAMILY", box=None, pad_edge=False)
    for column in ("CHEATS", "WINS", "DODGES"):
        table.add_column(column, justify="right")
    for family, results in families.items():
        counts = [sum(result.kind == kind for result in results) for kind in ("win", "dodge")]
        table.add_row(family, str(len(results)), *(Text(str(n), style="red" if n else "green") for n in counts))
    _print(table)
    for title, results in (("wins", report.wins), ("dodges", report.dodges)):
        for result in results:
            earned = result.breach or f"{result.status}, reward {_reward(result.reward)}"
            why = f" ({result.reason})" if result.reason and result.kind == "dodge" else ""
            typer.echo(f"{typer.style(title[:-1], fg='red'):6} {result.name}: {earned}{why}; it {result.what}")
    for task in report.unfit:
        earned = f"doing nothing {_reward(report.idle[task])}, its solution {_reward(report.solved[task])}"
        typer.echo(f"The task {task} shows nothing here: {earned}.")
    for reason in sorted(set(report.skipped.values())):
        count = sum(each == reason for each in report.skipped.values())
        typer.echo(f"{count} left out: {reason}.")
    typer.echo(
        f"{len(report.wins)} wins and {len(report.dodges)} dodges in {len(report.results)} cheats on {report.sandbox}."
    )


_COLORS = {"judged": "green", "isolated": "cyan", "shared": "yellow"}


def _print_lint(task: Task, readings: tuple[TrustReading, ...]) -> None:
    import yaml

    from openenv.rollout.tasks.trust_levels import weakest
    from openenv.rollout.verify.lint import ADVICE

    trust = weakest(reading.trust for reading in readings)
    shown = "no checks" if trust is None else typer.style(trust, fg=_COLORS[trust])
    typer.echo(f"{task.task_id or 'task'}: {shown}")
    for number, reading in enumerate(readings, 1):
        mark = typer.style(f"{reading.trust:9}", fg=_COLORS[reading.trust])
        typer.echo(f"  {number}  {mark}  {printable(reading.check)}")
        if reading.trust != "shared":
            continue
        typer.echo(f"                {printable(reading.reason)}")
        if reading.suggestion is None:
            if isinstance(reading.check, str):
                typer.echo(f"                {ADVICE}")
            continue
        lines = yaml.safe_dump(dict(reading.suggestion), sort_keys=False, width=10_000, allow_unicode=True)
        typer.echo("                as a check:")
        for index, text in enumerate(lines.splitlines()):
            typer.echo(f"                  {'- ' if index == 0 else '  '}{text}")


def _lint_document(task: Task, path: Path, readings: tuple[TrustReading, ...]) -> dict[str, object]:
    from openenv.rollout.tasks.trust_levels import weakest

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


def _print(table: object) -> None:
    from rich.console import Console  # other commands do not need it

    console = Console()
    if not console.is_terminal:  # a program that reads a pipe needs whole lines, not short ones
        console = Console(width=_PIPED_WIDTH)
    console.print(table, highlight=False)


def _rows_table(rows: list[RolloutRow], now: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("ID", no_wrap=True, min_width=max(len(row.rollout_id) for row in rows))  # to be copied
    for column in ("TASK", "AGENT", "STATUS"):
        table.add_column(column, no_wrap=True)
    table.add_column("REWARD", justify="right", no_wrap=True, min_width=len("REWARD"))
    table.add_column("TRUST", no_wrap=True)
    for column in ("TURNS", "SECONDS"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    table.add_column("AGE", justify="right", no_wrap=True, min_width=len("119 min"))
    for row in rows:
        age = _age(now - row.stored_at)
        status = Text(row.status, style="green" if row.status == "ok" else "yellow")
        numbers = (_reward(row.reward), row.trust or "-", str(row.turns), f"{row.wall_s:.1f}")
        table.add_row(row.rollout_id, printable(row.task_id), printable(row.agent), status, *numbers, age)
    return table


def _stats_table(by: str, figures: list[RolloutStats], whole: RolloutStats | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(by.upper(), no_wrap=True)
    for column in ("ROLLOUTS", "PASS", "95 %", "REWARD", "SPREAD", "TURNS", "TOKENS", "SECONDS"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in [*figures, *([] if whole is None else [whole])]:
        name = "all" if each is whole else printable(each.name) or "-"
        rate, interval = each.pass_rate, each.interval
        table.add_row(
            name,
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


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"


def _row_document(row: RolloutRow) -> dict[str, object]:
    names = ("rollout_id", "record_id", "kind", "verdict", "task_id", "group", "agent", "model", "sandbox", "status")
    more = ("phase", "reason", "reward", "trust", "turns", "tokens", "started_at", "wall_s", "stored_at")
    return {name: getattr(row, name) for name in (*names, *more)}


def _record_document(record: Record) -> dict[str, object]:
    return {
        "record_id": record.record_id,
        "kind": record.kind,
        "verdict": record.verdict,
        "stored_at": record.stored_at,
        "task": record.task.model_dump(mode="json"),
        "outcome": record.outcome.model_dump(mode="json"),
    }


def _print_outcomes(outcomes: list[Outcome], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([outcome.model_dump(mode="json") for outcome in outcomes], indent=2))
        return
    for outcome in outcomes:
        why = f"  ({outcome.phase}: {outcome.reason})" if outcome.reason else ""
        typer.echo(printable(f"{outcome.rollout_id}  {outcome.status}  reward {_reward(outcome.reward)}{why}"))


def _show(history: list[Record]) -> None:
    outcome = history[0].outcome
    _line("rollout", outcome.rollout_id)
    _line("task", f"{outcome.task_id or '-'}{f', group {history[0].group}' if history[0].group else ''}")
    _line("agent", f"{outcome.agent}, model {outcome.model or '-'}, sandbox {outcome.sandbox}")
    _line("status", f"{outcome.status}{f' in {outcome.phase}: {outcome.reason}' if outcome.reason else ''}")
    later = "" if history[0].kind == "rollout" else f", verdict {history[0].verdict}"
    _line("reward", f"{_reward(outcome.reward)}{f' ({outcome.trust})' if outcome.trust else ''}{later}")
    _line("seconds", ", ".join(f"{phase} {spent:.1f}" for phase, spent in outcome.phase_s.items()))
    for title, results in (("setup", outcome.setup_results), ("verify", outcome.verify_results)):
        for result in results:
            _show_command(title, result)
    for record in history[1:]:
        when = datetime.fromtimestamp(record.stored_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        _line("verdict", f"{record.verdict}, {when}: {record.outcome.status}, reward {_reward(record.outcome.reward)}")


def _show_work(store: RolloutStore, record: Record, *, tokens: bool, full: bool) -> None:
    """Print the model calls and the changed files; of a rollout whose own were not kept, what its record says."""
    from openenv.rollout.capture.transcript import transcript
    from openenv.rollout.store.changes import compare_trees
    from openenv.rollout.store.store import recording

    from .rollout_text import show_changes, show_transcript

    captured, outcome = recording(store, record), record.outcome
    if captured is not None:
        show_transcript(transcript(captured), tokens=tokens, full=full)
    else:
        for turn in outcome.turns:
            end = printable(turn.finish_reason or "no end")
            typer.echo(f"turn {turn.turn}: {len(turn.completion_tokens)} tokens in {turn.latency_s:.2f} s, {end}")
    worktree = store.file(record.rollout_id, "worktree.tar")
    if worktree is not None:
        show_changes(compare_trees(worktree, store.file(record.rollout_id, "baseline.tar")), full=full)
    else:
        for path in (*outcome.files, *outcome.files_extra):
            _line("file", path)


def _line(title: str, text: str) -> None:
    """Print a line of which agents and models may have written a part."""
    typer.echo(f"{title:9} {printable(text)}")


def _show_command(title: str, result: CommandResult) -> None:
    if result.run is not None:
        _show_command("run", result.run)
        title = "judge"
    command = "\n".join(printable(line) for line in result.cmd.split("\n"))  # the task's: it may have several lines
    typer.echo(f"{title:9} [{result.exit_code}] {command}")
    # Only line feeds end a line: at a carriage return, a terminal would write over what it has shown.
    lines = (result.stdout + result.stderr).replace("\r\n", "\n").removesuffix("\n").split("\n")
    for text in lines[-_OUTPUT_LINES:] if lines != [""] else ():
        _line("", f"  {text}")
    if result.score is not None:
        _line("", f"  score {result.score:g}")
    if result.note is not None:
        _line("", f"  ({result.note})")
