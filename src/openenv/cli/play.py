"""`openenv play`: a model plays a served environment; rewards as they come, then a summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import typer

from openenv import settings
from openenv.errors import OpenEnvError, RolloutError

from .command import failure
from .rollouts import endpoint_model

if TYPE_CHECKING:
    from openenv.rollout.store.store import RolloutStore
    from openenv.rollout.tasks.task import Model
    from openenv.train.groups import EpisodeSample, SampleGroup


def play(
    url: list[str] = typer.Argument(..., metavar="URL...", help="The server, or several that share the episodes."),
    base_url: str = typer.Option(..., metavar="URL", help="The model's endpoint, ending in /v1."),
    model: str = typer.Option(..., metavar="MODEL", help="The model's id at that endpoint."),
    api_key: str | None = typer.Option(
        None,
        metavar="KEY",
        help="The endpoint's key. Better set OPENENV_MODEL_KEY, which others on this machine cannot see.",
    ),
    sampling: str | None = typer.Option(None, metavar="JSON", help='How the model samples: {"temperature": 1.0}.'),
    episodes: int = typer.Option(16, "--episodes", "-n", metavar="N", min=1, help="How many different starts."),
    samples: int = typer.Option(1, metavar="N", min=1, help="How many episodes from each start."),
    seed: int = typer.Option(1, metavar="SEED", help="The seed of the first start; the others follow it."),
    concurrency: int = typer.Option(16, metavar="N", min=1, help="How many are played at once."),
    system: str = typer.Option("", metavar="TEXT", help="What the model is asked to do."),
    max_turns: int = typer.Option(20, metavar="N", min=1, help="How many answers an episode has at most."),
    max_tokens: int | None = typer.Option(None, metavar="N", min=1, help="How many tokens an answer has at most."),
    token: str | None = typer.Option(None, metavar="TOKEN", help="A token of the server; see openenv serve --help."),
    store: Path | None = typer.Option(
        None, metavar="FOLDER", help="Keep episodes here, with every token, for openenv rollouts ls, show and export."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object per episode instead."),
) -> None:
    """Let a model play a served environment, many episodes at once.

    An environment with tools is played by tool calls, any other by texts or JSON. A failure of the server or the
    endpoint is played again and is no reward. Exits with 1 if an episode has none in the end.

      openenv serve maze.py --max-sessions 64
      openenv play http://localhost:8000 --base-url http://localhost:8001/v1 \\
          --model NAME -n 64 --concurrency 64 --system "Find the way out."
    """
    try:
        endpoint = endpoint_model(base_url, model, api_key or settings.model_key(), sampling)
        assert endpoint is not None
        options: dict[str, Any] = {
            "samples": samples,
            "concurrency": min(concurrency, episodes * samples),
            "system": system,
            "max_turns": max_turns,
            "max_tokens": max_tokens,
            "client_options": {} if token is None else {"token": token},
        }
        with _kept_in(store) as kept:
            starts = range(seed, seed + episodes)
            played = asyncio.run(_play(url, endpoint, starts, {**options, "store": kept}, as_json=as_json))
    except (OpenEnvError, ValueError) as exc:
        raise failure(exc) from None
    if not as_json:
        _print_summary(played)
    if any(sample.reward is None for sample in played):
        raise typer.Exit(1)


@contextlib.contextmanager
def _kept_in(folder: Path | None) -> Iterator[RolloutStore | None]:
    """Open the store, where there is to be one."""
    if folder is None:
        yield None
        return
    from openenv.rollout.store.store import RolloutStore

    with RolloutStore(folder) as store:
        yield store


async def _play(
    urls: Sequence[str], model: Model, starts: range, options: dict[str, Any], *, as_json: bool
) -> list[EpisodeSample]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from openenv.train.episodes import play as play_episodes

    played: list[EpisodeSample] = []
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("mean reward {task.fields[mean]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(starts) * options["samples"], mean="-")

        def show(group: SampleGroup) -> None:
            played.extend(group.samples)
            if as_json:
                for sample in group.samples:
                    typer.echo(json.dumps(_row(sample)))
            known = [sample.reward for sample in played if sample.reward is not None]
            progress.update(bar, completed=len(played), mean=f"{fmean(known):.3f}" if known else "-")

        async with play_episodes(list(urls), model, starts, on_failed=show, **options) as stream:
            try:
                async for group in stream:
                    show(group)
            except RolloutError:
                if not played:  # else what failed is in the summary, with its reason
                    raise
    return played


def _row(sample: EpisodeSample) -> dict[str, Any]:
    outcome = sample.outcome
    return {
        "episode": outcome.rollout_id,
        "start": outcome.metadata["start"],
        "sample": outcome.metadata["sample"],
        "status": outcome.status,
        "reason": outcome.reason,
        "reward": outcome.reward,
        "turns": len(outcome.turns),
        "tokens": sum(one.n_trainable for one in sample.trainable),
        "wall_s": round(outcome.wall_s, 3),
    }


def _print_summary(played: Sequence[EpisodeSample]) -> None:
    rewards = [sample.reward for sample in played if sample.reward is not None]
    failed = [sample for sample in played if sample.reward is None]
    truncated = sum(sample.outcome.status == "truncated" for sample in played)
    turns = fmean(len(sample.outcome.turns) for sample in played)
    if rewards:
        spread = f" ± {stdev(rewards):.3f}" if len(rewards) > 1 else ""
        typer.echo(f"mean reward  {fmean(rewards):.3f}{spread} (from {min(rewards):g} to {max(rewards):g})")
    typer.echo(f"episodes     {len(played)}, {turns:.1f} answers each; {truncated} were not over at the end")
    if failed:
        typer.echo(f"failed       {len(failed)}, not by the model; the last one: {failed[-1].outcome.reason}")
