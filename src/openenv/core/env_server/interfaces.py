"""Facade: the environment's base class and its models. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.environment import Environment as Environment
from openenv.env.environment import Message as Message
from openenv.env.environment import ModelTokenizer as ModelTokenizer
from openenv.env.environment import TaskProvider as TaskProvider
from openenv.env.environment import Transform as Transform
from openenv.types import Action as Action
from openenv.types import ActT as ActT
from openenv.types import EnvironmentMetadata as EnvironmentMetadata
from openenv.types import Observation as Observation
from openenv.types import ObsT as ObsT
from openenv.types import State as State
from openenv.types import StateT as StateT

export_imports(__name__)
