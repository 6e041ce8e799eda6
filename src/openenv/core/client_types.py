"""Facade: what clients return. Re-exports only; the code lives in `openenv.types`."""

from __future__ import annotations

from openenv.types import (
    StepResult,
)

__all__ = [
    "StepResult",
]
