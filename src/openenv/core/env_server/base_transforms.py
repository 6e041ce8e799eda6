"""Facade: transforms. Re-exports only; the code lives in `openenv.env.environment`."""

from __future__ import annotations

from openenv.env.environment import CompositeTransform, NullTransform, Transform
from openenv.types import (
    Observation,
)

__all__ = [
    "CompositeTransform",
    "NullTransform",
    "Observation",
    "Transform",
]
