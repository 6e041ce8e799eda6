"""Facade: rubrics over whole episodes. Re-exports only; the code lives in `openenv.rubrics.trajectory`."""

from __future__ import annotations

from openenv.rubrics.base import (
    Rubric,
)
from openenv.rubrics.trajectory import (
    ExponentialDiscountingTrajectoryRubric,
    TrajectoryRubric,
)

__all__ = [
    "ExponentialDiscountingTrajectoryRubric",
    "Rubric",
    "TrajectoryRubric",
]
