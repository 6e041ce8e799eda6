"""Facade: rubrics over whole episodes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.rubrics.rubric import ExponentialDiscountingTrajectoryRubric as ExponentialDiscountingTrajectoryRubric
from openenv.env.rubrics.rubric import Rubric as Rubric
from openenv.env.rubrics.rubric import TrajectoryRubric as TrajectoryRubric

export_imports(__name__)
