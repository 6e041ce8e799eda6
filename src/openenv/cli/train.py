"""`openenv train`: a language model learns on a served environment or on tasks."""

from __future__ import annotations

import asyncio
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openenv.errors import OpenEnvError

from .command import check_choice, failure, printable
from .options import Panel, flags_class, options_of
from .rollouts.selection import TASKS_HELP

if TYPE_CHECKING:
    from openenv.train.learner.recipe import TrainingRun

# Copies, because showing help must not load the trainer; tests compare them.
ALGORITHMS = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline")
LOGGERS = ("tensorboard", "trackio", "wandb")
TRAINERS = ("openenv", "trl")
_SHOWN = {
    "train/reward": "reward",
    "eval/reward": "held-out reward",
    "train/turns": "turns",
    "update/gap": "gap",
    "time/rollouts_s": "rollouts s",
    "time/update_s": "update s",
}
"""The metrics of a line of progress."""


def _algorithm(value: str) -> str:
    check_choice("--algorithm", value, ALGORITHMS)
    return value


def _loggers(values: list[str]) -> list[str]:
    for value in values:
        check_choice("--logger", value, LOGGERS)
    return values


def _trainer(value: str) -> str:
    check_choice("--trainer", value, TRAINERS)
    return value


@flags_class
class SourceFlags:
    """What the model learns on."""

    env: Annotated[str | None, typer.Option(metavar="URL", help="A served environment.")] = None
    token: Annotated[str | None, typer.Option(metavar="TOKEN", help="The server's token.")] = None
    system_prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="The model's system prompt, there and in shell-chat.")
    ] = ""
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Show the model only the text of the environment's observations.")
    ] = False
    tasks: Annotated[list[str], typer.Option(metavar="TASK", help=f"Repeatable. {TASKS_HELP}")] = field(
        default_factory=list
    )
    agent: Annotated[
        str | None, typer.Option(metavar="AGENT", help="The agent that works on the tasks; by default shell-chat.")
    ] = None
    held_out: Annotated[
        int, typer.Option(metavar="N", min=0, help="Starts or tasks that only evaluations see; 0 for none.")
    ] = 16


@flags_class
class LengthFlags:
    """How much is sampled, and how long the run takes."""

    updates: Annotated[int | None, typer.Option(metavar="N", min=1, help="End after this number of updates.")] = None
    minutes: Annotated[float | None, typer.Option(metavar="N", min=0.0, help="End after this time.")] = None
    groups: Annotated[int, typer.Option(metavar="N", min=1, help="Starts or tasks per update.")] = 8
    samples: Annotated[int, typer.Option(metavar="N", min=2, help="Episodes or rollouts from each of them.")] = 8
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Episodes or rollouts at once.")] = 32
    max_turns: Annotated[
        int, typer.Option(metavar="N", min=1, help="Replies per episode; other agents have their own limit.")
    ] = 8
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per reply.")] = 128
    context: Annotated[int, typer.Option(metavar="N", min=16, help="Tokens per episode.")] = 2048


@flags_class
class LearningFlags:
    """The model, how it learns, and the folder of the run."""

    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="A folder of transformers, a .gguf file, a name on the Hub, or tiny (random)."
        ),
    ]
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Checkpoints, metrics and episodes.")] = Path("runs/train")
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last checkpoint.")] = (
        False
    )
    algorithm: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            callback=_algorithm,
            help=f"How rewards become advantages: {', '.join(ALGORITHMS)}.",
        ),
    ] = "grpo"
    learning_rate: Annotated[float, typer.Option(metavar="RATE", min=0.0, help="Of AdamW.")] = 1e-5
    evaluate_every: Annotated[int, typer.Option(metavar="N", min=0, help="Updates between evaluations.")] = 10
    checkpoint_every: Annotated[int, typer.Option(metavar="N", min=0, help="Updates between checkpoints.")] = 10
    loggers: Annotated[
        list[str],
        typer.Option("--logger", metavar="NAME", callback=_loggers, help=f"Repeatable: {', '.join(LOGGERS)}."),
    ] = field(default_factory=list)
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, or auto.")] = "auto"
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of starts, tasks and answers.")] = 0


@flags_class
class TrainFlags:
    """Options of `openenv train`. The fields of the three groups are those of a `TrainingRun`."""

    learning: LearningFlags
    source: Annotated[SourceFlags, Panel("Environment or tasks")]
    length: Annotated[LengthFlags, Panel("Length")]
    trainer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            callback=_trainer,
            help="openenv, or trl: TRL's GRPOTrainer on a served environment, without evaluations.",
        ),
    ] = "openenv"


@options_of(TrainFlags)
def train(flags: TrainFlags) -> None:
    """Train a language model on a served environment or on tasks.

    Samples, rewards and updates on this machine: on a GPU if there is one, else on the CPU. Needs torch and
    transformers. The last line names the checkpoint, which transformers and vLLM can load.

      openenv serve my_env --max-sessions 64
      openenv train --model HuggingFaceTB/SmolLM2-135M-Instruct \\
          --env http://localhost:8000 --minutes 15

    Tasks run in sandboxes; names of task sets work as well as folders:

      openenv train --model ./smollm2.gguf --tasks ./my_tasks --updates 50

    The model `tiny` has random weights and writes characters. It learns small
    environments on a CPU in minutes:

      openenv train --model tiny --text-only --learning-rate 3e-3 \\
          --env http://localhost:8000 --max-tokens 4 --minutes 5

    An interrupted run continues with the same options and --resume.
    """
    if (flags.source.env is None) == (not flags.source.tasks):
        raise typer.BadParameter("give either --env URL or --tasks TASK", param_hint="--env")
    if flags.length.updates is None and flags.length.minutes is None:
        raise typer.BadParameter("give --updates or --minutes, so that the run ends", param_hint="--updates")
    if flags.trainer == "trl" and flags.source.env is None:
        raise typer.BadParameter("TRL trains on a served environment: give --env", param_hint="--trainer")
    try:
        if flags.trainer == "trl":
            from openenv.train.trainers.trl import train_with_trl

            last = train_with_trl(_run(flags))
        else:
            from openenv.train.learner.recipe import train_policy

            last = asyncio.run(train_policy(_run(flags), _print_progress))
    # A missing package, no server at the URL, an unreadable model; ValueError: options that do not fit together.
    except (OpenEnvError, ValueError, OSError) as exc:
        raise failure(exc) from None
    typer.echo(str(last))


def _run(flags: TrainFlags) -> TrainingRun:
    from openenv.train.learner.recipe import TrainingRun

    return TrainingRun(**vars(flags.learning), **vars(flags.source), **vars(flags.length))


# Sample:
#
#    12  reward 0.53  turns 4.2  gap 0.00031  rollouts s 3.1  update s 1.8
#    20  held-out reward 0.61
def _print_progress(update: int, metrics: dict[str, Any]) -> None:
    figures = [f"{name} {metrics[key]:.3g}" for key, name in _SHOWN.items() if key in metrics]
    typer.echo(printable(f"{update:5d}  {'  '.join(figures)}"), err=True)
