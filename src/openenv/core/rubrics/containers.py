"""Facade: rubrics made of rubrics. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.rubrics.containers import Gate as Gate
from openenv.env.rubrics.containers import RubricDict as RubricDict
from openenv.env.rubrics.containers import RubricList as RubricList
from openenv.env.rubrics.containers import Sequential as Sequential
from openenv.env.rubrics.containers import WeightedSum as WeightedSum
from openenv.env.rubrics.rubric import Rubric as Rubric

export_imports(__name__)
