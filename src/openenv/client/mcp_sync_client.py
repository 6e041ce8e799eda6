"""The blocking twins of the tool clients: a plain socket and no event loop.

Know their clients; add nothing to the protocol. A subclass that overrides a method is called, not passed by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

from ..tool_types import Tool
from ..types import Observation, State
from .mcp_client import MCPClientBase, MCPToolClient
from .mcp_requests import ProgressHandler
from .sync_client import SyncEnvClient


class SyncMCPClient(SyncEnvClient[Any, Observation, State]):
    """Blocks where its `MCPClientBase` would be awaited."""

    def __init__(self, async_client: MCPClientBase) -> None:
        super().__init__(async_client)
        self._tool_client = async_client

    def list_tools(self, use_cache: bool = True) -> list[Tool]:
        """Return the environment's tools; see `MCPClientBase.list_tools`."""
        tools: list[Tool] = self._driver.run_helper(self._tool_client.list_tools, use_cache=use_cache)
        return tools

    def new_session(self) -> Self:
        """Return another blocking client of the same server, with a session of its own."""
        return type(self)(self._tool_client.new_session())


class SyncMCPToolClient(SyncMCPClient):
    """Blocks where its `MCPToolClient` would be awaited."""

    _tool_client: MCPToolClient

    def __init__(self, async_client: MCPToolClient) -> None:
        super().__init__(async_client)

    def call_tool(self, tool_name: str = "", /, **kwargs: Any) -> Any:
        """Call a tool; every keyword is an argument of the tool. See `MCPToolClient.call_tool`."""
        return self._driver.run_helper(self._tool_client.call_tool, *([tool_name] if tool_name else []), **kwargs)

    def call_tool_with(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> Any:
        """Call a tool under a limit of its own, or listen to its progress. See `MCPToolClient.call_tool_with`."""
        call = self._tool_client.call_tool_with
        return self._driver.run_helper(call, name, arguments, timeout_s=timeout_s, on_progress=on_progress)

    def get_tool(self, name: str) -> Tool | None:
        """Return the tool of that name, or None."""
        tool: Tool | None = self._driver.run_helper(self._tool_client.get_tool, name)
        return tool

    def has_tool(self, name: str) -> bool:
        """Say whether there is a tool of that name."""
        found: bool = self._driver.run_helper(self._tool_client.has_tool, name)
        return found
