"""Missing rewards, decided for an environment and never for a single episode.

Many environments pay at the end only, or for success only. So a missing reward counts as 0 if the environment gives
rewards at all. If it never gives one, an episode of zeros would be an invention: the run stops.

    no reward yet ── a reward in any episode, or declared ──> gives rewards: missing ones count as 0
         └── `REWARDLESS_EPISODES` episodes end ──> NoRewards

Knows rewards only; must not know sessions, models or trainers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

from openenv.errors import NoRewards

from .vector.results import SlotResult, VectorResult

REWARDLESS_EPISODES: Final = 64
"""So many episodes may end before the first reward of a run."""


class RewardHistory:
    """Whether an environment gives rewards, in all episodes of a run.

    Args:
        is_declared: Whether it is known to give rewards.
        limit: How many episodes may end before the first reward.
    """

    __slots__ = ("_about", "_limit", "_rewardless", "gives_rewards")

    def __init__(self, *, is_declared: bool = False, limit: int = REWARDLESS_EPISODES) -> None:
        self.gives_rewards = is_declared
        self._limit = limit
        self._rewardless = 0
        self._about: str | None = None

    def value(self, reward: float | None) -> float:
        """Record the reward of a step; return it as a number, 0 for a missing one."""
        if reward is None:
            return 0.0
        self.gives_rewards = True
        return float(reward)

    def values(self, result: VectorResult[Any]) -> Sequence[float]:
        """Record a step of several sessions; return its rewards, 0 for missing ones and NaN for failed slots.

        Raises:
            NoRewards: The environment has not given any reward in too many episodes.
        """
        if result.columns is None:
            single = [self._value_of(slot) for slot in result.by_slot]
            self.end_episodes(sum(slot.terminated or slot.truncated for slot in result.by_slot))
            return single
        columns = result.columns
        if not self.gives_rewards:
            begun = 0 if columns.begun is None else int(columns.begun.sum())
            self.gives_rewards = len(columns.single) + begun < len(columns)
        if not columns.single:
            array: Sequence[float] = columns.rewards
            return array
        values: list[float] = columns.rewards.tolist()
        for row, slot in columns.single.items():
            values[row] = self._value_of(slot)
        return values

    def _value_of(self, slot: SlotResult[Any]) -> float:
        last = slot.result if slot.final is None else slot.final
        has_failed = last is None or (slot.error is not None and slot.final is None)
        return slot.reward if has_failed or last is None else self.value(last.reward)

    def end_episodes(self, count: int = 1, about: str | None = None) -> None:
        """Record the end of episodes.

        Args:
            count: How many have ended.
            about: Why the last one ended, for the error.

        Raises:
            NoRewards: The environment has not given any reward in too many episodes.
        """
        if self.gives_rewards:
            return
        self._rewardless += count
        self._about = about
        if self._rewardless >= self._limit:
            raise self.error()

    def error(self) -> NoRewards:
        """Return the error for an environment that never gave a reward."""
        last = f" The last episode: {self._about}." if self._about else ""
        return NoRewards(
            f"No reward in {self._rewardless} episodes. Set `reward` in the observations of the environment's `step`, "
            "or add checks to the tasks. If only rare successes are rewarded, declare it with gives_rewards=True."
            + last
        )


@functools.lru_cache(maxsize=64)
def reward_history(url: str) -> RewardHistory:
    """Return the history of a server's rewards in this process, for trainers that build an object per episode."""
    return RewardHistory()
