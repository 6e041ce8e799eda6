"""Options as keyword arguments: `run_many(tasks, agent="noop")` takes the fields of the options dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import RolloutStore, Task, reverify, run_many, run_rollout
from openenv.rollout.run.batch import BatchArguments, BatchOptions
from openenv.rollout.run.engine import EngineArguments, EngineOptions
from openenv.rollout.run.reverify import NewVerdict, NewVerdictArguments
from openenv.train.episodes import PlayArguments, PlayOptions
from openenv.train.stream import StreamArguments, StreamOptions

TASK = Task(instruction="Do nothing.", verify=["true"])


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (EngineOptions, EngineArguments),
        (BatchOptions, BatchArguments),
        (NewVerdict, NewVerdictArguments),
        (StreamOptions, StreamArguments),
        (PlayOptions, PlayArguments),
    ],
)
def test_every_option_is_a_keyword_argument(options: Any, arguments: Any) -> None:
    assert {field.name for field in fields(options)} == arguments.__optional_keys__
    assert not arguments.__required_keys__


@pytest.mark.parametrize(
    "call",
    [
        lambda store, **unknown: run_rollout(TASK, agent="noop", **unknown),
        lambda store, **unknown: run_many([TASK], agent="noop", **unknown),
        lambda store, **unknown: reverify(store, "some-id", **unknown),
    ],
)
def test_an_unknown_option_is_refused(call: Callable[..., object], tmp_path: Path) -> None:
    with (
        RolloutStore(tmp_path) as store,
        pytest.raises(TypeError, match="unexpected keyword argument 'sandbocks'"),
    ):
        call(store, sandbocks="local")
