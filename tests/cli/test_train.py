"""`openenv train`: its options. `tests/train/learner` trains with it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib.util import find_spec
from typing import get_args

import pytest
from typer.testing import CliRunner

from openenv.cli.__main__ import build
from openenv.cli.train import ALGORITHMS, LOGGERS, LearningFlags, LengthFlags, SourceFlags
from openenv.train.groups import Method
from openenv.train.trackers import TRACKERS

ENV = ("--env", "http://127.0.0.1:9")
END = ("--updates", "1")


def trained(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(["train"]), ["train", "--model", "tiny", *options])
    return result.exit_code, " ".join(result.output.split())


def test_the_choices_are_those_of_the_trainer() -> None:
    assert get_args(Method) == ALGORITHMS
    assert {*LOGGERS, "jsonl"} == set(TRACKERS)  # JSON lines are always written


def test_the_options_are_the_fields_of_a_run_with_their_defaults() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from openenv.train.learner.recipe import TrainingRun

    defaults = {field.name: field.default for field in fields(TrainingRun) if field.name != "processes"}
    options = [field for group in (LearningFlags, SourceFlags, LengthFlags) for field in fields(group)]
    # A list of options is made by a factory, and a run's is an immutable `()`.
    assert {
        option.name: () if option.default_factory is not MISSING else option.default for option in options
    } == defaults


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (END, "give either --env URL or --tasks TASK"),
        ((*ENV, "--tasks", "arithmetic", *END), "give either --env URL or --tasks TASK"),
        (ENV, "give --updates or --minutes"),
        ((*ENV, *END, "--algorithm", "ppo"), "'ppo' is not one of grpo, dr_grpo, rloo"),
        ((*ENV, *END, "--logger", "mlflow"), "'mlflow' is not one of tensorboard, trackio, wandb"),
        ((*ENV, *END, "--trainer", "verl"), "'verl' is not one of openenv, trl"),
        (("--tasks", "arithmetic", *END, "--trainer", "trl"), "TRL trains on a served environment: give --env"),
        ((*ENV, *END, "--samples", "1"), "Invalid value for '--samples'"),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_name(options: tuple[str, ...], reason: str) -> None:
    code, output = trained(*options)
    assert code == 2
    assert reason in output


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is installed")
@pytest.mark.parametrize("trainer", ["openenv", "trl"])
def test_without_pytorch_the_command_that_installs_it_is_named(trainer: str) -> None:
    code, output = trained(*ENV, *END, "--trainer", trainer)
    assert code == 1
    assert "pip install 'torch>=2.4'" in output
    assert "Traceback" not in output
