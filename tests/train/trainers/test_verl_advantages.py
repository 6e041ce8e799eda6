"""Our advantages beside those of veRL: the same rewards and masks go through both."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("verl", reason="it has an environment of its own: make test-trainers")

import numpy
import torch
from verl.trainer.ppo import core_algos

from openenv.rollout.capture import Sequence
from openenv.rollout.store.outcome import Outcome
from openenv.train import EpisodeSample, SampleGroup, collate
from openenv.train.groups import Method, Objective

pytestmark = [pytest.mark.slow]


def groups_of(draw: random.Random) -> list[SampleGroup]:
    """Return groups of single-turn samples with drawn rewards and lengths; rewards are also the turn's."""
    groups = []
    for number in range(5):
        samples = []
        for _ in range(draw.randint(2, 6)):
            length, reward = draw.randint(1, 9), draw.choice([0.0, 0.25, 1.0, -3.5])
            row = Sequence(
                "agent",
                1,
                [1],
                2,
                [length],
                [5] * (2 + length),
                [0, 0] + [1] * length,
                [0.0] * (2 + length),
                ["1"],
                [2],
            )
            outcome = Outcome(rollout_id="r", status="ok", reward=reward)
            samples.append(EpisodeSample(outcome, [row], turn_rewards={1: reward}))
        groups.append(SampleGroup(f"g{number}", {}, samples))
    return groups


def theirs(groups: list[SampleGroup], method: str) -> torch.Tensor:
    """Return veRL's advantage of each response token, padded with zeros."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    width = max(sample.n_tokens for _, sample in samples)
    mask = torch.zeros(len(samples), width)
    rewards = torch.zeros(len(samples), width)
    for row, (_, sample) in enumerate(samples):
        mask[row, : sample.n_tokens] = 1
        rewards[row, sample.n_tokens - 1] = sample.reward or 0.0
    index = numpy.array([str(number) for number, _ in samples], dtype=object)
    if method == "grpo":
        return core_algos.compute_grpo_outcome_advantage(rewards, mask, index)[0]
    if method == "dr_grpo":
        return core_algos.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)[0]
    if method == "rloo":
        return core_algos.compute_rloo_outcome_advantage(rewards, mask, index)[0]
    if method == "reinforce++":
        return core_algos.compute_reinforce_plus_plus_outcome_advantage(
            token_level_rewards=rewards, response_mask=mask, config=core_algos.AlgoConfig(gamma=1.0)
        )[0]
    return core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_advantages_equal_those_of_verl(method: Method, seed: int) -> None:
    groups = groups_of(random.Random(seed))
    expected = theirs(groups, method)
    batch = collate(groups, method)
    for row, values in enumerate(batch.advantages):
        count = sum(batch.loss_mask[row])
        ours = torch.tensor(values[2 : 2 + count])
        torch.testing.assert_close(ours, expected[row, :count], rtol=1e-4, atol=1e-5)


def test_credit_by_turn_of_one_turn_equals_credit_by_episode() -> None:
    groups = groups_of(random.Random(9))
    by_turn = collate(groups, Objective(method="reinforce++", credit="turn"))
    by_episode = collate(groups, "reinforce++")
    for one, other, mask in zip(by_turn.advantages, by_episode.advantages, by_turn.loss_mask, strict=True):
        assert [a for a, bit in zip(one, mask, strict=True) if bit] == pytest.approx(
            [a for a, bit in zip(other, mask, strict=True) if bit]
        )
