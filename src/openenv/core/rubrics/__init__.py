"""Facade: rubrics. Re-exports only; the code lives in `openenv.rubrics`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rubrics import ExponentialDiscountingTrajectoryRubric as ExponentialDiscountingTrajectoryRubric
from openenv.rubrics import Gate as Gate
from openenv.rubrics import LLMJudge as LLMJudge
from openenv.rubrics import Rubric as Rubric
from openenv.rubrics import RubricDict as RubricDict
from openenv.rubrics import RubricList as RubricList
from openenv.rubrics import Sequential as Sequential
from openenv.rubrics import TrajectoryRubric as TrajectoryRubric
from openenv.rubrics import WeightedSum as WeightedSum

export_imports(__name__)
