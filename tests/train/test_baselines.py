"""Advantages and batches: what is compared with what, and what is left out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from openenv.rollout.capture import Sequence
from openenv.rollout.store.outcome import Outcome
from openenv.train import EpisodeSample, SampleGroup, advantages, collate


def sample(reward: float | None, *rows: tuple[list[int], list[int], list[float]]) -> EpisodeSample:
    status: Any = "env_failed" if reward is None else "ok"
    outcome = Outcome(rollout_id="r", status=status, reward=reward)
    sequences = [Sequence("agent", 1, [1], 1, [sum(mask)], ids, mask, values, ["3"]) for ids, mask, values in rows]
    return EpisodeSample(outcome, sequences)


def test_grpo_compares_within_a_group_and_leaves_failures_out() -> None:
    ((low, failed, high),) = advantages([[0.0, None, 1.0]])
    assert failed is None
    assert low == pytest.approx(-1, abs=1e-4)
    assert high == pytest.approx(1, abs=1e-4)
    assert advantages([[0.7, 0.7], [None], [0.3]]) == [[0.0, 0.0], [None], [0.0]]


def test_rloo_compares_with_the_others() -> None:
    assert advantages([[1.0, 0.0, None, 0.5]], "rloo") == [[0.75, -0.75, None, 0.0]]
    assert advantages([[1.0]], "rloo") == [[0.0]]


def test_reinforce_compares_with_all_groups() -> None:
    values = advantages([[1.0, 1.0], [0.0, 0.0, None]], "reinforce++")
    assert values[1][2] is None
    assert values[0] == pytest.approx([1, 1], abs=1e-4)
    assert values[1][:2] == pytest.approx([-1, -1], abs=1e-4)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_rewards_that_are_no_numbers_are_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages([[0.0, reward]])
    with pytest.raises(ValueError, match="'grpo', 'rloo'"):
        advantages([[0.0]], "ppo")  # type: ignore[arg-type]


ROWS = [
    sample(1.0, ([1, 2, 3], [0, 1, 1], [0.0, -0.1, -0.2])),
    sample(0.0, ([4, 5], [0, 1], [0.0, -0.3])),
    sample(None, ([6, 7], [0, 1], [0.0, -0.4])),
]


def test_a_padded_batch_has_a_row_per_sequence() -> None:
    batch = SampleGroup("g", {}, ROWS).collate("rloo", pad_id=9)
    assert batch.input_ids == [[1, 2, 3], [4, 5, 9]]
    assert batch.loss_mask == [[0, 1, 1], [0, 1, 0]]
    assert batch.old_logprobs == [[0.0, -0.1, -0.2], [0.0, -0.3, 0.0]]
    assert batch.advantages == [[1, 1, 1], [-1, -1, 0]]
    assert batch.attention_mask == [[1, 1, 1], [1, 1, 0]]
    assert batch.position_ids == [[0, 1, 2], [0, 1, 0]]
    assert (len(batch), batch.n_tokens, batch.sequence_ends) == (2, 3, [3, 2])


def test_a_packed_batch_is_one_row() -> None:
    batch = collate([SampleGroup("g", {}, ROWS)], "rloo", layout="packed")
    assert batch.input_ids == [[1, 2, 3, 4, 5]]
    assert batch.loss_mask == [[0, 1, 1, 0, 1]]
    assert batch.position_ids == [[0, 1, 2, 0, 1]]
    assert batch.advantages == [[1, 1, 1, -1, -1]]
    assert batch.sequence_ends == [3, 5]


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(ValueError, match="may be trained on"):
        SampleGroup("g", {}, [ROWS[2]]).collate()
    with pytest.raises(ValueError, match="choose from 'padded', 'packed'"):
        SampleGroup("g", {}, ROWS).collate(layout="flat")  # type: ignore[arg-type]


def test_tensors_need_pytorch() -> None:
    batch = SampleGroup("g", {}, ROWS).collate()
    try:
        import torch  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install torch"):
            batch.torch()
    else:
        assert batch.torch()["input_ids"].shape == (2, 3)
