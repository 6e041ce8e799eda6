"""What `benchmarks/exactness.py` measures, with fewer episodes: every captured token is the engine's, and only sampled
ones are trained on."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openenv.rollout.capture.training_trace import Sequence

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "exactness.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("exactness", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exactness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_episodes_with_tools_are_captured_exactly(script: ModuleType) -> None:
    with script.scripted() as engine:
        result = asyncio.run(script.measure(engine, 6, 2, 5.0))
    assert result.is_exact()
    assert (result.episodes, result.calls, result.sequences) == (6, 18, 6)
    assert result.context > result.tokens > 0


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        ({"input_ids": [1, 2, 9, 4, 5]}, "other_ids"),
        ({"loss_mask": [0, 0, 1, 1, 1]}, "trained_context"),
        ({"loss_mask": [0, 0, 1, 0, 0]}, "missed"),
        ({"logprobs": [0.0, 0.0, -0.1, 0.0, -0.5]}, "largest_difference"),
        ({"role": "discarded"}, "not_trainable"),
    ],
)
def test_whatever_differs_is_counted(script: ModuleType, change: dict[str, Any], counted: str) -> None:
    right: dict[str, Any] = {
        "role": "agent",
        "root_id": 1,
        "node_ids": [1, 2],
        "prompt_len": 2,
        "turn_lengths": [1, 1],
        "input_ids": [1, 2, 3, 4, 5],
        "loss_mask": [0, 0, 1, 0, 1],
        "logprobs": [0.0, 0.0, -0.1, 0.0, -0.2],
        "policy_versions": [None, None],
    }
    replays = [script.Replay([1, 2], [3], [-0.1]), script.Replay([1, 2, 3, 4], [5], [-0.2])]
    exact, other = script.Exactness(), script.Exactness()
    exact.add(Sequence(**right), replays)
    other.add(Sequence(**{**right, **change}), replays)
    assert exact.is_exact()
    assert getattr(exact, counted) == 0
    assert getattr(other, counted) > 0
    assert not other.is_exact()


def test_a_call_of_two_sequences_is_trained_on_once(script: ModuleType) -> None:
    replays = [script.Replay([1, 2], [3], [-0.1]), script.Replay([1, 2, 3, 4], [5], [-0.2])]
    ids, values = [1, 2, 3, 4, 5], [0.0, 0.0, -0.1, 0.0, -0.2]
    once, twice = script.Exactness(), script.Exactness()
    once.add(Sequence("agent", 1, [1, 3], 2, [1, 1], ids, [0, 0, 0, 0, 1], values, [None, None]), replays, 1)
    twice.add(Sequence("agent", 1, [1, 3], 2, [1, 1], ids, [0, 0, 1, 0, 1], values, [None, None]), replays, 1)
    assert once.is_exact()
    assert twice.trained_context == 1


@pytest.mark.slow
def test_episodes_of_a_real_model_are_captured_exactly(script: ModuleType, engine: Any) -> None:
    result = asyncio.run(script.measure(script.LlamaEngine([engine.url]), 25, 1, 1.5))
    sys.stdout.write(f"\n{result}\n")
    assert (result.other_ids, result.trained_context, result.missed) == (0, 0, 0)
    assert result.largest_difference < script.FLOAT_ERROR
    # An answer that became other tokens in the next prompt reads as one that was not gone on from.
    assert result.not_trainable <= result.sequences // 10
    assert result.calls == 3 * result.episodes > 0
