"""Facade: environments with MCP tools, on the module path that existing code imports.

FastMCP loads with the first name that is used. The models of tools can be imported from here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.env.mcp_environment import MCP_TOOL_CALL_TIMEOUT as MCP_TOOL_CALL_TIMEOUT
    from openenv.env.mcp_environment import MCPEnvironment as MCPEnvironment
    from openenv.env.mcp_environment import get_server_tools as get_server_tools

    from .interfaces import Environment as Environment
    from .mcp_types import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
    from .mcp_types import Action as Action
    from .mcp_types import CallToolAction as CallToolAction
    from .mcp_types import CallToolObservation as CallToolObservation
    from .mcp_types import ListToolsAction as ListToolsAction
    from .mcp_types import ListToolsObservation as ListToolsObservation
    from .mcp_types import Observation as Observation
    from .mcp_types import Tool as Tool
    from .mcp_types import ToolError as ToolError
    from .mcp_types import ToolErrorType as ToolErrorType

    __all__: list[str]
else:
    _OWN = by_module({"openenv.env.mcp_environment": "MCP_TOOL_CALL_TIMEOUT MCPEnvironment get_server_tools"})
    _MODELS = by_module(
        {
            "openenv.core.env_server.interfaces": "Environment",
            "openenv.core.env_server.mcp_types": """
                Action CallToolAction CallToolObservation ListToolsAction ListToolsObservation Observation
                RESERVED_TOOL_NAMES Tool ToolError ToolErrorType
            """,
        }
    )
    __getattr__, __dir__, _names = lazy_exports(__name__, {**_OWN, **_MODELS})
    __all__ = list(_OWN)
