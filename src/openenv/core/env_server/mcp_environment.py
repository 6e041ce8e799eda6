"""Facade: environments with MCP tools, on the module path that existing code imports.

FastMCP loads with the first name that is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

if TYPE_CHECKING:
    from openenv.env.mcp import MCP_TOOL_CALL_TIMEOUT as MCP_TOOL_CALL_TIMEOUT
    from openenv.env.mcp import MCPEnvironment as MCPEnvironment
    from openenv.env.mcp import get_server_tools as get_server_tools

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, dict.fromkeys(("MCP_TOOL_CALL_TIMEOUT", "MCPEnvironment", "get_server_tools"), "openenv.env.mcp")
    )
