"""Facade: rubrics made of rubrics. Re-exports only; the code lives in `openenv.rubrics.containers`."""

from __future__ import annotations

from openenv.rubrics.containers import (
    Gate,
    RubricDict,
    RubricList,
    Sequential,
    WeightedSum,
)
from openenv.rubrics.rubric import Rubric

__all__ = [
    "Gate",
    "Rubric",
    "RubricDict",
    "RubricList",
    "Sequential",
    "WeightedSum",
]
