"""Facade: rubrics over whole episodes. Re-exports only; the code lives in `openenv.rubrics.rubric`."""

from __future__ import annotations

from openenv.rubrics.rubric import ExponentialDiscountingTrajectoryRubric, Rubric, TrajectoryRubric

__all__ = [
    "ExponentialDiscountingTrajectoryRubric",
    "Rubric",
    "TrajectoryRubric",
]
