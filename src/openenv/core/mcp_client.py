"""Facade: clients for tools. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.client.env_client import EnvClient as EnvClient
from openenv.client.mcp_client import GenericMCPObservation as GenericMCPObservation
from openenv.client.mcp_client import MCPClientBase as MCPClientBase
from openenv.client.mcp_client import MCPToolClient as MCPToolClient
from openenv.protocol.tool_messages import CallToolAction as CallToolAction
from openenv.protocol.tool_messages import CallToolObservation as CallToolObservation
from openenv.protocol.tool_messages import ListToolsAction as ListToolsAction
from openenv.protocol.tool_messages import ListToolsObservation as ListToolsObservation
from openenv.protocol.tool_messages import Tool as Tool
from openenv.protocol.tool_messages import ToolError as ToolError
from openenv.types import Observation as Observation
from openenv.types import State as State
from openenv.types import StepResult as StepResult

export_imports(__name__)
