"""Facade: re-exports the environment's base class and its models; the code lives in `openenv.env` and `openenv.types`."""

from __future__ import annotations

from openenv.env.environment import Environment, Message, ModelTokenizer, TaskProvider, Transform
from openenv.types import Action, ActT, EnvironmentMetadata, Observation, ObsT, State, StateT

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
