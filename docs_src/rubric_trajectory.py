from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from openenv.core.rubrics import ExponentialDiscountingTrajectoryRubric


class WonAtTheEnd(ExponentialDiscountingTrajectoryRubric):
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        return 1.0 if trajectory[-1][1].won else 0.0


rubric = WonAtTheEnd(gamma=0.5)
print(rubric("a", SimpleNamespace(done=False, won=False)))
print(rubric("b", SimpleNamespace(done=False, won=False)))
print(rubric("c", SimpleNamespace(done=True, won=True)))
print(rubric.compute_step_rewards())
rubric.reset()  # between episodes
