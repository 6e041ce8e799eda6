"""`openenv play`: a model plays a served environment; prints rewards during the run and a summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openenv.errors import OpenEnvError, RolloutError

from .command import OldName, failure, printable
from .model_flags import ModelFlags
from .options import flags_class, options_of

if TYPE_CHECKING:
    from openenv.rollout.store.store import RolloutStore
    from openenv.rollout.tasks.task import Model
    from openenv.train.groups import EpisodeSample, SampleGroup


# `openenv play` starts no process. The model and the environment run already:
#
#   environment server(s) <──sessions── play ──model calls──> capture proxy (in this process) ──> model endpoint
#                                         │                        │
#                                         │                        └─ records tokens and log-probabilities
#                                         └──> --store FOLDER, for openenv rollouts ls, show and export
@flags_class
class PlayFlags:
    """Options of `openenv play`."""

    url: Annotated[list[str], typer.Argument(metavar="URL...", help="The server, or several that share the episodes.")]
    model: ModelFlags
    episodes: Annotated[
        int, typer.Option("--episodes", "-n", metavar="N", min=1, help="Number of different starts.")
    ] = 16
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Episodes from each start.")] = 1
    seed: Annotated[int, typer.Option(metavar="SEED", help="Seed of the first start; each next one adds 1.")] = 1
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Number of parallel episodes.")] = 16
    system_prompt: Annotated[
        str,
        typer.Option("--system-prompt", OldName("--system"), metavar="TEXT", help="The model's system prompt."),
    ] = ""
    template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The first message of an episode, with {description}, {actions} and {observation}; "
            "by default the environment's own template, or all three.",
        ),
    ] = None
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="Show the model only the observation's text."),
    ] = False
    max_turns: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum replies per episode.")] = 20
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Maximum tokens of a reply.")] = None
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The server's token; see openenv serve --help.")
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Store episodes here, with every token, for openenv rollouts ls, show and export."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per episode instead.")] = False


@options_of(PlayFlags)
def play(flags: PlayFlags) -> None:
    """Let a model play a served environment, many episodes at once.

    The model reads the environment's description, the form of its actions and all fields of the observations. If the
    environment has tools, the model calls them; otherwise it answers with text or JSON. An episode's reward is the sum
    of its rewards. Failures of the server or the endpoint are retried and never scored. Exits with 1 if an episode ends
    without a reward.

      openenv serve maze.py --max-sessions 64
      openenv play http://localhost:8000 --llm-url http://localhost:8001/v1 \\
          --model NAME -n 64 --concurrency 64 --system-prompt "Find the way out."
    """
    # `ModelFlags` allows an absent model for agents that need none; here both options are required.
    for option, value in (("--llm-url", flags.model.llm_url), ("--model", flags.model.model)):
        if value is None:
            raise typer.BadParameter("give the model that plays", param_hint=option)
    try:
        endpoint = flags.model.endpoint()
        assert endpoint is not None
        with _open_store(flags.store) as store:
            played = asyncio.run(_play(flags, endpoint, store))
    # No server at the URL, a refused token, an endpoint without an answer; ValueError: options of the model that do not
    # fit together.
    except (OpenEnvError, ValueError, OSError) as exc:
        raise failure(exc) from None
    if not flags.as_json:
        _print_summary(played)
    # For scripts: a missing reward means that the infrastructure failed, never that the model played badly.
    if any(sample.reward is None for sample in played):
        raise typer.Exit(1)


@contextlib.contextmanager
def _open_store(folder: Path | None) -> Iterator[RolloutStore | None]:
    """Open the store, if the user named one."""
    if folder is None:
        yield None
        return
    from openenv.rollout.store.store import RolloutStore

    with RolloutStore(folder) as store:
        yield store


async def _play(flags: PlayFlags, model: Model, store: RolloutStore | None) -> list[EpisodeSample]:
    """Play all episodes, with a progress bar on a terminal; return all samples, with or without a reward."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from openenv.train.episodes import play as play_episodes

    # -n 64 --samples 4 plays 256 episodes: 4 from each of 64 starts, which form a group.
    count = flags.episodes * flags.samples
    played: list[EpisodeSample] = []
    # Standard error, so that `--json > episodes.jsonl` contains only JSON.
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("mean reward {task.fields[mean]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=count, mean="-")

        # Called once per start, when its last sample is over; failed groups come through `on_failed`.
        def show(group: SampleGroup) -> None:
            played.extend(group.samples)
            if flags.as_json:
                for sample in group.samples:
                    typer.echo(json.dumps(_row(sample)))
            rewards = [sample.reward for sample in played if sample.reward is not None]
            progress.update(bar, completed=len(played), mean=f"{fmean(rewards):.3f}" if rewards else "-")

        # Each start is the seed of a reset, so that two runs with the same --seed compare the same episodes.
        starts = range(flags.seed, flags.seed + flags.episodes)
        async with play_episodes(
            flags.url,
            model,
            starts,
            samples=flags.samples,
            # No more sessions than episodes: each one takes a slot of the server.
            concurrency=min(flags.concurrency, count),
            system=flags.system_prompt,
            template="" if flags.template is None else flags.template.read_text(encoding="utf-8"),
            text_only=flags.text_only,
            max_turns=flags.max_turns,
            max_tokens=flags.max_tokens,
            client_options={} if flags.token is None else {"token": flags.token},
            store=store,
            on_failed=show,
        ) as stream:
            try:
                async for group in stream:
                    show(group)
            # Every episode failed with all its retries.
            except RolloutError:
                if not played:  # otherwise the summary shows the failure
                    raise
    return played


# A line of `--json`:
#
#   {"episode": "...", "start": 1, "sample": 0, "status": "ok", "reason": null, "reward": 1.0, "turns": 5,
#    "tokens": 212, "wall_s": 3.21}
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
    # The summary:
    #
    #   mean reward  0.625 ± 0.518 (from 0 to 1)
    #   episodes     8, 4.2 replies each; 1 truncated
    #   failed       1 without a reward; the last reason: ...
    rewards = [sample.reward for sample in played if sample.reward is not None]
    failed = [sample for sample in played if sample.reward is None]
    truncated = sum(sample.outcome.status == "truncated" for sample in played)
    turns = fmean(len(sample.outcome.turns) for sample in played)
    if rewards:
        # A standard deviation needs two values.
        spread = f" ± {stdev(rewards):.3f}" if len(rewards) > 1 else ""
        typer.echo(f"mean reward  {fmean(rewards):.3f}{spread} (from {min(rewards):g} to {max(rewards):g})")
    typer.echo(f"episodes     {len(played)}, {turns:.1f} replies each; {truncated} truncated")
    if failed:
        typer.echo(
            f"failed       {len(failed)} without a reward; the last reason: {printable(failed[-1].outcome.reason)}"
        )
