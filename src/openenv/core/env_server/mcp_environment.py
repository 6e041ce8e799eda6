"""Facade: environments with MCP tools. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.env.environment import Environment as Environment
    from openenv.env.mcp_environment import MCP_TOOL_CALL_TIMEOUT as MCP_TOOL_CALL_TIMEOUT
    from openenv.env.mcp_environment import MCPEnvironment as MCPEnvironment
    from openenv.env.mcp_environment import get_server_tools as get_server_tools
    from openenv.protocol.tool_messages import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
    from openenv.protocol.tool_messages import CallToolAction as CallToolAction
    from openenv.protocol.tool_messages import CallToolObservation as CallToolObservation
    from openenv.protocol.tool_messages import ListToolsAction as ListToolsAction
    from openenv.protocol.tool_messages import ListToolsObservation as ListToolsObservation
    from openenv.protocol.tool_messages import Tool as Tool
    from openenv.protocol.tool_messages import ToolError as ToolError
    from openenv.protocol.tool_messages import ToolErrorType as ToolErrorType
    from openenv.types import Action as Action
    from openenv.types import Observation as Observation

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module({"openenv.env.mcp_environment": "MCPEnvironment MCP_TOOL_CALL_TIMEOUT get_server_tools"}),
        unlisted={
            **by_module(
                {
                    "openenv.env.environment": "Environment",
                    "openenv.protocol.tool_messages": """
                CallToolAction CallToolObservation ListToolsAction ListToolsObservation
                RESERVED_TOOL_NAMES Tool ToolError ToolErrorType
            """,
                    "openenv.types": "Action Observation",
                }
            )
        },
    )
