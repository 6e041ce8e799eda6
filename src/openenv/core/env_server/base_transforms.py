"""Facade: transforms. Re-exports only; the code lives in `openenv.env.transforms`."""

from __future__ import annotations

from openenv.env.environment import (
    Transform,
)
from openenv.env.transforms import (
    CompositeTransform,
    NullTransform,
)
from openenv.types import (
    Observation,
)

__all__ = [
    "CompositeTransform",
    "NullTransform",
    "Observation",
    "Transform",
]
