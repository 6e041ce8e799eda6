"""Facade: the environment's base class and its models, from `openenv.env` and `openenv.types`. Re-exports only."""

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
