"""Facade: the environment's base class. Re-exports only; the code lives in `openenv.env.environment`."""

from __future__ import annotations

from openenv.env.environment import (
    Action,
    ActT,
    Environment,
    EnvironmentMetadata,
    Message,
    ModelTokenizer,
    Observation,
    ObsT,
    State,
    StateT,
    TaskProvider,
    Transform,
)

__all__ = [
    "ActT",
    "Action",
    "Environment",
    "EnvironmentMetadata",
    "Message",
    "ModelTokenizer",
    "ObsT",
    "Observation",
    "State",
    "StateT",
    "TaskProvider",
    "Transform",
]
