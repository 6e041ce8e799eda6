"""Rubrics that score a whole episode: they collect its steps and give the score when an observation is done.

Knows the steps of one episode and how its score is spread over them. Must not know what makes an episode good.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from .base import Rubric


class TrajectoryRubric(Rubric):
    """Collect the steps of an episode; give `intermediate_reward` for each until one is done, then the score.

    Both methods to write are synchronous. `reset` must be called between episodes.
    """

    def __init__(self, intermediate_reward: float = 0.0) -> None:
        super().__init__()
        self.intermediate_reward = intermediate_reward
        self._trajectory: list[tuple[Any, Any]] = []

    @abstractmethod
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        """Score the (action, observation) pairs of an episode."""

    @abstractmethod
    def compute_step_rewards(self) -> list[float]:
        """Spread the score over the steps collected so far."""

    def forward(self, action: Any, observation: Any) -> float:
        """Collect the step, and score the episode where the observation is done."""
        self._trajectory.append((action, observation))
        if getattr(observation, "done", False):
            return self.score_trajectory(self.trajectory)
        return self.intermediate_reward

    @property
    def trajectory(self) -> list[tuple[Any, Any]]:
        """Return a copy of the steps collected so far."""
        return list(self._trajectory)

    def reset(self) -> None:
        """Forget the episode, here and in the children."""
        super().reset()
        self._trajectory = []

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration; the steps are not part of it."""
        return {**super().state_dict(), "intermediate_reward": self.intermediate_reward}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the configuration."""
        super().load_state_dict(state)
        self.intermediate_reward = state.get("intermediate_reward", self.intermediate_reward)


class ExponentialDiscountingTrajectoryRubric(TrajectoryRubric):
    """Give step t of T the episode's score times `gamma ** (T - 1 - t)`: the last step gets all of it.

    Raises:
        ValueError: `gamma` is outside [0, 1].
    """

    def __init__(self, gamma: float = 0.99, intermediate_reward: float = 0.0) -> None:
        super().__init__(intermediate_reward)
        self.gamma = _checked_gamma(gamma)

    def compute_step_rewards(self) -> list[float]:
        """Discount the score of the steps collected so far; no steps, no rewards."""
        steps = len(self._trajectory)
        if steps == 0:
            return []
        score = self.score_trajectory(self.trajectory)
        return [self.gamma ** (steps - 1 - step) * score for step in range(steps)]

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration; the steps are not part of it."""
        return {**super().state_dict(), "gamma": self.gamma}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the configuration."""
        gamma = _checked_gamma(state.get("gamma", self.gamma))
        super().load_state_dict(state)
        self.gamma = gamma


def _checked_gamma(gamma: float) -> float:
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], not {gamma}")
    return gamma
