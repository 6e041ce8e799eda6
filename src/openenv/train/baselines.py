"""Advantages of samples by their rewards. A sample without a reward failed for reasons that are not the policy's: it
counts in no baseline and has no advantage."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Literal

Method = Literal["grpo", "rloo", "reinforce++"]
"""`grpo`: the distance from the group's mean in standard deviations. `rloo`: the distance from the mean of the others
of the group. `reinforce++`: the distance from the mean of all groups in standard deviations."""
Rewards = Sequence[float | None]

_SMALLEST = 1e-6
"""Added to a standard deviation: a group whose rewards are nearly equal must not get huge advantages."""


def advantages(groups: Sequence[Rewards], method: Method = "grpo") -> list[list[float | None]]:
    """Return the advantage of each sample, group by group.

    A group with one reward, or none, has nothing to compare with: its advantages are 0 by `grpo` and `rloo`.

    Raises:
        ValueError: there is no such method, or a reward is not finite.
    """
    for reward in (reward for rewards in groups for reward in rewards):
        if reward is not None and not abs(reward) < float("inf"):
            raise ValueError(f"a reward must be a finite number, not {reward}")
    if method == "grpo":
        return [_standardised(rewards, *_mean_and_deviation(rewards)) for rewards in groups]
    if method == "rloo":
        return [_left_out(rewards) for rewards in groups]
    if method == "reinforce++":
        mean, deviation = _mean_and_deviation([reward for rewards in groups for reward in rewards])
        return [_standardised(rewards, mean, deviation) for rewards in groups]
    raise ValueError(f"there is no method {method!r}: take 'grpo', 'rloo' or 'reinforce++'")


def _mean_and_deviation(rewards: Rewards) -> tuple[float, float]:
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return 0.0, 0.0
    mean = sum(known) / len(known)
    return mean, sqrt(sum((reward - mean) ** 2 for reward in known) / len(known))


def _standardised(rewards: Rewards, mean: float, deviation: float) -> list[float | None]:
    return [None if reward is None else (reward - mean) / (deviation + _SMALLEST) for reward in rewards]


def _left_out(rewards: Rewards) -> list[float | None]:
    known = [reward for reward in rewards if reward is not None]
    total, others = sum(known), len(known) - 1
    return [None if reward is None else (reward - (total - reward) / others if others else 0.0) for reward in rewards]
