"""Facade: rubrics. Re-exports only; the code lives in `openenv.env.rubrics`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.rubrics import ExponentialDiscountingTrajectoryRubric as ExponentialDiscountingTrajectoryRubric
from openenv.env.rubrics import Gate as Gate
from openenv.env.rubrics import LLMJudge as LLMJudge
from openenv.env.rubrics import Rubric as Rubric
from openenv.env.rubrics import RubricDict as RubricDict
from openenv.env.rubrics import RubricList as RubricList
from openenv.env.rubrics import Sequential as Sequential
from openenv.env.rubrics import TrajectoryRubric as TrajectoryRubric
from openenv.env.rubrics import WeightedSum as WeightedSum

export_imports(__name__)
