"""Facade: actions in, observations out. Re-exports only; the code lives in `openenv.protocol`."""

from __future__ import annotations

from openenv.protocol.codec import (
    serialize_observation,
)
from openenv.protocol.schema import (
    deserialize_action,
    deserialize_action_with_preprocessing,
)

__all__ = [
    "deserialize_action",
    "deserialize_action_with_preprocessing",
    "serialize_observation",
]
