"""Advantages and batches: what is compared with what, and what is left out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from openenv.rollout.capture import Sequence
from openenv.rollout.store.outcome import Outcome
from openenv.train import EpisodeSample, LengthPenalty, Objective, SampleGroup, advantages, collate
from openenv.train.groups import METHODS, Method


def sample(reward: float | None, *rows: tuple[list[int], list[int], list[float]], **options: Any) -> EpisodeSample:
    """Return an episode with sequences of one call each; the first token is the prompt."""
    status: Any = options.pop("status", "env_failed" if reward is None else "ok")
    outcome = Outcome(rollout_id="r", status=status, reward=reward)
    sequences = [
        Sequence("agent", number, [number], 1, [len(ids) - 1], ids, mask, values, ["3"], turn_starts=[1])
        for number, (ids, mask, values) in enumerate(rows, 1)
    ]
    return EpisodeSample(outcome, sequences, **options)


def played(reward: float, turn_rewards: dict[int, float], *lengths: int) -> EpisodeSample:
    """Return an episode with one sequence, in which a token of the environment stands before each answer."""
    ids, mask, starts = [], [], []
    for length in lengths:
        starts.append(len(ids) + 1)
        ids += [0] + [7] * length
        mask += [0] + [1] * length
    numbers = list(range(1, len(lengths) + 1))
    row = Sequence("agent", 1, numbers, 1, list(lengths), ids, mask, [-0.1 * bit for bit in mask], ["3"], starts)
    return EpisodeSample(Outcome(rollout_id="r", status="ok", reward=reward), [row], turn_rewards=turn_rewards)


def test_grpo_compares_within_a_group_and_leaves_failures_out() -> None:
    ((low, failed, high),) = advantages([[0.0, None, 1.0]])
    assert failed is None
    assert low == pytest.approx(-math.sqrt(0.5), abs=1e-5)  # the deviation of 0 and 1 is sqrt(1/2)
    assert high == pytest.approx(math.sqrt(0.5), abs=1e-5)
    assert advantages([[0.7, 0.7], [None], [0.3]]) == [[0.0, 0.0], [None], [0.0]]


def test_dr_grpo_keeps_the_scale_of_the_rewards() -> None:
    assert advantages([[3.0, None, 1.0], [5.0]], "dr_grpo") == [[1.0, None, -1.0], [0.0]]


def test_rloo_compares_with_the_others() -> None:
    assert advantages([[1.0, 0.0, None, 0.5]], "rloo") == [[0.75, -0.75, None, 0.0]]
    assert advantages([[1.0]], "rloo") == [[0.0]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reward", [0.1, 1e10 / 3, -7e99])
def test_equal_rewards_have_advantages_of_exactly_zero(method: Method, reward: float) -> None:
    assert advantages([[reward] * 7, [reward, None, reward], [reward]], method) == [[0.0] * 7, [0.0, None, 0.0], [0.0]]


def test_reinforce_compares_with_all_groups() -> None:
    values = advantages([[1.0, 1.0], [0.0, 0.0, None]], "reinforce++")
    assert values[1][2] is None
    assert values[0] == pytest.approx([math.sqrt(0.75)] * 2, abs=1e-4)
    assert values[1][:2] == pytest.approx([-math.sqrt(0.75)] * 2, abs=1e-4)
    assert advantages([[1.0]], "reinforce++") == [[0.0]]


def test_reinforce_counts_a_sample_once_for_each_token() -> None:
    (values,) = advantages([[1.0, 0.0]], "reinforce++", tokens=[[3, 1]])
    # Four tokens with the rewards 1 1 1 0: mean 3/4, variance 1/4.
    assert values == pytest.approx([0.5, -1.5], abs=1e-6)
    (compared,) = advantages([[1.0, 0.0]], "reinforce++-baseline", tokens=[[3, 1]])
    # Distances 1/2 1/2 1/2 -1/2: mean 1/4, variance 1/4.
    assert compared == pytest.approx([0.5, -1.5], abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1e200])
def test_rewards_that_are_no_numbers_or_too_large_to_compare_are_refused(reward: float, method: Method) -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages([[0.0, reward]], method)
    largest = advantages([[1e100, -1e100, 1e100]], method)
    assert all(math.isfinite(value) for value in largest[0] if value is not None)
    with pytest.raises(ValueError, match="'grpo', 'dr_grpo', 'rloo'"):
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
    assert batch.turn_ids == [[0, 1, 1], [0, 1, 0]]
    assert (len(batch), batch.n_tokens, batch.sequence_ends, batch.cu_seqlens) == (2, 3, [3, 2], None)


def test_a_packed_batch_is_one_row_without_a_mask_that_would_join_its_sequences() -> None:
    batch = collate([SampleGroup("g", {}, ROWS)], "rloo", layout="packed")
    assert batch.input_ids == [[1, 2, 3, 4, 5]]
    assert batch.loss_mask == [[0, 1, 1, 0, 1]]
    assert batch.position_ids == [[0, 1, 2, 0, 1]]
    assert batch.advantages == [[1, 1, 1, -1, -1]]
    assert (batch.sequence_ends, batch.cu_seqlens) == ([3, 5], [0, 3, 5])
    assert batch.attention_mask is None


def test_a_batch_names_the_sample_and_the_group_of_each_sequence() -> None:
    two = sample(1.0, ([1, 2], [0, 1], [0.0, -0.1]), ([1, 3], [0, 1], [0.0, -0.1]))
    batch = collate([SampleGroup("a", {}, [ROWS[2], two]), SampleGroup("b", {}, ROWS)], "dr_grpo")
    assert batch.sample_ids == [1, 1, 2, 3]
    assert batch.group_ids == [0, 0, 1, 1]
    assert batch.turn_ids == [[0, 1, 0], [0, 2, 0], [0, 1, 1], [0, 1, 0]]


def test_a_length_penalty_lowers_the_reward_over_the_last_tokens() -> None:
    penalty = LengthPenalty(limit=10, buffer=4, factor=0.5)
    assert [penalty.of(tokens) for tokens in (0, 6, 8, 10, 50)] == [0, 0, 0.25, 0.5, 0.5]
    short, long = played(1.0, {}, 2), played(1.0, {}, 10)
    batch = collate([SampleGroup("g", {}, [short, long])], Objective(method="dr_grpo", length_penalty=penalty))
    assert [row[1] for row in batch.advantages] == [0.25, -0.25]
    with pytest.raises(ValueError, match="buffer <= limit"):
        LengthPenalty(limit=4, buffer=5)


def test_episodes_that_a_limit_ended_count_in_the_mean_but_are_not_trained_on() -> None:
    cut = sample(0.0, ([1, 2], [0, 1], [0.0, -0.1]), status="truncated")
    group = SampleGroup("g", {}, [ROWS[0], cut])
    assert group.collate("dr_grpo").advantages == [[0.5, 0.5, 0.5], [-0.5, -0.5, 0.0]]
    batch = group.collate(Objective(method="dr_grpo", mask_cut_off=True))
    assert batch.advantages == [[0.5, 0.5, 0.5]]
    with pytest.raises(ValueError, match="mask_cut_off is set"):
        SampleGroup("g", {}, [cut, cut]).collate(Objective(mask_cut_off=True))


def test_with_credit_by_turn_a_call_gets_the_rewards_from_it_on() -> None:
    group = SampleGroup("g", {}, [played(3.0, {2: 1.0, 3: 2.0}, 2, 1, 1)])
    batch = group.collate(Objective(method="reinforce++", credit="turn", discount=0.5))
    # Sums from each call on: 0 + 0.5 * 2 = 1, 1 + 0.5 * 2 = 2, 2. At four tokens: 1 1 2 2, mean 3/2, variance 1/3.
    step = 0.5 * math.sqrt(3)
    assert batch.advantages[0] == pytest.approx([0, -step, -step, 0, step, 0, step], abs=1e-6)


def test_grpo_by_turn_compares_all_turn_rewards_of_the_group() -> None:
    group = SampleGroup("g", {}, [played(1.0, {1: 1.0}, 1, 1), played(0.0, {}, 1)])
    batch = group.collate(Objective(credit="turn"))
    # Turn rewards 1 0 and 0: mean 1/3, deviation sqrt(1/3).
    high, low = (1 - 1 / 3) * math.sqrt(3), (0 - 1 / 3) * math.sqrt(3)
    assert batch.advantages[0] == pytest.approx([0, high + low, 0, low], abs=1e-5)
    assert batch.advantages[1] == pytest.approx([0, low, 0, 0], abs=1e-5)


@pytest.mark.parametrize("method", ["grpo", "reinforce++"])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_turn_reward_that_is_not_finite_is_refused(reward: float, method: Method) -> None:
    groups = [SampleGroup("g", {}, [played(1.0, {0: reward, 1: 1.0}, 2, 2), played(0.0, {0: 0.0, 1: 0.0}, 2, 2)])]
    with pytest.raises(ValueError, match="finite"):
        collate(groups, Objective(method=method, credit="turn"))


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0])
def test_a_length_penalty_is_finite(factor: float) -> None:
    with pytest.raises(ValueError, match="finite factor"):
        LengthPenalty(limit=10, buffer=5, factor=factor)


def test_credit_by_turn_needs_turn_rewards_and_a_method_that_has_it() -> None:
    with pytest.raises(ValueError, match="use credit='episode'"):
        SampleGroup("g", {}, ROWS).collate(Objective(credit="turn"))
    with pytest.raises(ValueError, match="choose 'grpo' or 'reinforce"):
        Objective(method="rloo", credit="turn")
    with pytest.raises(ValueError, match="from 0 to 1"):
        Objective(discount=1.5)
    with pytest.raises(ValueError, match="choose from 'episode', 'turn'"):
        Objective(credit="token")  # type: ignore[arg-type]


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
