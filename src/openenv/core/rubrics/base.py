"""Facade: the rubric's base class. Re-exports only; the code lives in `openenv.rubrics.base`."""

from __future__ import annotations

from openenv.rubrics.base import (
    Rubric,
)

__all__ = [
    "Rubric",
]
