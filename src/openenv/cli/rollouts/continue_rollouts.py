"""`openenv rollouts resume` and `branch`: continue interrupted rollouts, and run continuations from a model call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..command import printable
from ..model_flags import ModelFlags
from ..options import flags_class, options_of
from .run import countdown, print_progress, report
from .selection import Json, Store, one_line_failures, open_store

if TYPE_CHECKING:
    from openenv.rollout.store.outcome import Outcome
    from openenv.rollout.store.store import RolloutStore

_CONCURRENCY = 4


@flags_class
class ResumeFlags:
    """Options of `openenv rollouts resume`."""

    folder: Annotated[
        Path | None, typer.Argument(metavar="[STORE]", help="The store; by default that of `--store`.")
    ] = None
    model: ModelFlags
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Parallel rollouts.")] = _CONCURRENCY
    store: Store = None
    as_json: Json = False


@options_of(ResumeFlags)
def resume(flags: ResumeFlags) -> None:
    """Continue the rollouts of a store whose engine, proxy or machine died.

    Each starts in a fresh sandbox with its setup. Its agent gets the recorded answers again, then the model samples the
    rest. Agent, sandbox, model and limits are those of the rollout; give the endpoint's key in OPENENV_MODEL_KEY, or
    another endpoint with --llm-url and --model.

    Exits with 1 if the infrastructure (not the agent) failed in a rollout.

    Examples:

      openenv rollouts resume
      openenv rollouts resume runs/monday --concurrency 16
    """
    from openenv.rollout.run.stored_rollout import resume_rollouts

    with one_line_failures():
        engine = _engine_options(flags.model)
    with open_store(flags.folder or flags.store) as store:
        _forget_beginnings(store)
        count = len(store.interrupted())
        if count == 0:
            typer.echo("No rollout was interrupted.", err=True)
        outcomes = resume_rollouts(
            store,
            concurrency=flags.concurrency,
            on_progress=print_progress,
            on_outcome=countdown(count),
            **engine,
        )
        _print_divergences([outcome.metadata | {"id": outcome.rollout_id} for outcome in outcomes])
        report(outcomes, as_json=flags.as_json)


@flags_class
class BranchFlags:
    """Options of `openenv rollouts branch`."""

    rollout_id: Annotated[str, typer.Argument(metavar="ID", help="The rollout; a unique prefix of its ID is enough.")]
    at: Annotated[int, typer.Option("--at", metavar="CALL", min=0, help="The last model call to share; 0 for none.")]
    model: ModelFlags
    samples: Annotated[
        int, typer.Option("--samples", "-n", metavar="N", min=1, help="How many continuations to run.")
    ] = 8
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Parallel rollouts.")] = _CONCURRENCY
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Repeatable: derive the seed of each model call from this number."),
    ] = None
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="The server of a played episode; by default that of the episode.")
    ] = None
    token: Annotated[str | None, typer.Option(metavar="TOKEN", help="Its token.")] = None
    store: Store = None
    as_json: Json = False


@options_of(BranchFlags)
def branch(flags: BranchFlags) -> None:
    """Run several continuations of a rollout from the state after one of its model calls.

    Each runs in its own sandbox. The answers up to --at are those of the rollout and are not sampled again. Each starts
    with the files before its first own call, if they were recorded (`openenv rollouts run --record-files`) and the
    agent can skip work; else its agent repeats the work. The continuations are rollouts of one group with one parent.

    An episode of `openenv play` continues on its server: in forks of the environment if it supports them, otherwise
    each continuation repeats the recorded actions. Fails if their results differ from the recorded ones.

    Examples:

      openenv rollouts branch 3f2a --at 5 -n 8
      openenv rollouts ls --group 3f2a91c0@5-9c1b
    """
    from openenv.rollout.run.stored_rollout import StoredRollout

    with one_line_failures():
        engine = _engine_options(flags.model)
    with open_store(flags.store) as store, one_line_failures():
        rollout = StoredRollout(store, flags.rollout_id)
        if rollout.is_played:
            report(_played_branches(flags, store, engine), as_json=flags.as_json)
            return
        if flags.url is not None or flags.token is not None:
            raise typer.BadParameter("only for episodes of `openenv play`", param_hint="--url, --token")
        outcomes = rollout.branch(
            call=flags.at,
            samples=flags.samples,
            concurrency=flags.concurrency,
            seed=flags.seed,
            on_progress=print_progress,
            on_outcome=countdown(flags.samples),
            **engine,
        )
        _print_divergences([outcome.metadata | {"id": outcome.rollout_id} for outcome in outcomes])
        for line in sorted({_start_of(outcome.metadata) for outcome in outcomes}):
            typer.echo(printable(line), err=True)
        report(outcomes, as_json=flags.as_json)


def _played_branches(flags: BranchFlags, store: RolloutStore, engine: dict[str, Any]) -> list[Outcome]:
    from openenv.train.episodes import branch as branch_episode

    if flags.seed is not None:
        raise typer.BadParameter("an episode's branches would all be the same", param_hint="--seed")
    options: dict[str, Any] = {} if flags.token is None else {"client_options": {"token": flags.token}}
    played = branch_episode(
        store,
        flags.rollout_id,
        call=flags.at,
        samples=flags.samples,
        url=flags.url,
        concurrency=min(flags.concurrency, flags.samples),
        **engine,
        **options,
    )
    outcomes = [sample.outcome for sample in asyncio.run(played).samples]
    forks = sum(outcome.metadata.get("reached_by") == "fork" for outcome in outcomes)
    typer.echo(f"{forks} of {len(outcomes)} continue in forks; the others repeated the actions.", err=True)
    return outcomes


def _start_of(labels: dict[str, Any]) -> str:
    """Return how a branch started."""
    if "restored_call" in labels:
        return f"Started with the files before call {labels['restored_call']}."
    return f"Repeated the work before the branch: {labels.get('repeats_because', 'there is none')}."


def _engine_options(model: ModelFlags) -> dict[str, Any]:
    endpoint = model.endpoint()
    return {} if endpoint is None else {"model": endpoint}


def _forget_beginnings(store: RolloutStore) -> None:
    """Remove rollouts that were interrupted before they had a task."""
    for rollout_id in store.interrupted():
        store.is_begun(rollout_id)


def _print_divergences(metadata: list[dict[str, Any]]) -> None:
    # Sample:
    #
    #   3f2a91c0 asked something else than before: call 3 differs in messages 6: recorded '4 passed', now '1 failed'
    for labels in metadata:
        if "divergence" in labels:
            typer.echo(printable(f"{labels['id']} asked something else than before: {labels['divergence']}"), err=True)
