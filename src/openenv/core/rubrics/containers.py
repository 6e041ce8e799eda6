"""Facade: rubrics made of rubrics. Re-exports only; the code lives in `openenv.rubrics.containers`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rubrics.containers import Gate as Gate
from openenv.rubrics.containers import RubricDict as RubricDict
from openenv.rubrics.containers import RubricList as RubricList
from openenv.rubrics.containers import Sequential as Sequential
from openenv.rubrics.containers import WeightedSum as WeightedSum
from openenv.rubrics.rubric import Rubric as Rubric

export_imports(__name__)
