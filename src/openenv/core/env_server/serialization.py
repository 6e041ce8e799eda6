"""Facade: reading of actions and writing of observations. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.protocol.json_values import serialize_observation as serialize_observation
from openenv.protocol.schema import deserialize_action as deserialize_action
from openenv.protocol.schema import deserialize_action_with_preprocessing as deserialize_action_with_preprocessing
from openenv.protocol.tool_messages import CallToolAction as CallToolAction
from openenv.protocol.tool_messages import ListToolsAction as ListToolsAction
from openenv.types import Action as Action
from openenv.types import Observation as Observation

export_imports(__name__)
