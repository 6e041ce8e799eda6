"""The client of the Echo environment: lists and calls its tools."""

from __future__ import annotations

from openenv.core.mcp_client import MCPToolClient


class EchoEnv(MCPToolClient):
    """Calls `echo_message` and `echo_with_length`."""
