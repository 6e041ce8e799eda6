"""Facade: clients for tools. Re-exports only; the code lives in `openenv.client.mcp_client`."""

from __future__ import annotations

from openenv.client.env_client import EnvClient
from openenv.client.mcp_client import GenericMCPObservation, MCPClientBase, MCPToolClient
from openenv.tool_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
)
from openenv.types import (
    Observation,
    State,
    StepResult,
)

__all__ = [
    "CallToolAction",
    "CallToolObservation",
    "EnvClient",
    "GenericMCPObservation",
    "ListToolsAction",
    "ListToolsObservation",
    "MCPClientBase",
    "MCPToolClient",
    "Observation",
    "State",
    "StepResult",
    "Tool",
    "ToolError",
]
