"""Facade: actions in, observations out. Re-exports only; the code lives in `openenv.protocol`."""

from __future__ import annotations

from openenv.protocol.json_values import serialize_observation
from openenv.protocol.schema import (
    deserialize_action,
    deserialize_action_with_preprocessing,
)
from openenv.tool_types import (
    CallToolAction,
    ListToolsAction,
)
from openenv.types import (
    Action,
    Observation,
)

__all__ = [
    "Action",
    "CallToolAction",
    "ListToolsAction",
    "Observation",
    "deserialize_action",
    "deserialize_action_with_preprocessing",
    "serialize_observation",
]
