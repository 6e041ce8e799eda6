"""Facade: the rubric's base class. Re-exports only; the code lives in `openenv.rubrics.rubric`."""

from __future__ import annotations

from openenv.rubrics.rubric import Rubric

__all__ = [
    "Rubric",
]
