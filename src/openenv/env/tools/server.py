"""The tools of one FastMCP server: found without an event loop where possible, listed as MCP describes them.

A server is plain when its tools are its own functions and nothing stands between caller and function; only then may a
tool be called directly. Knows FastMCP; must not know modes or environments.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from fastmcp.server.middleware.dereference import DereferenceRefsMiddleware
from fastmcp.server.server import default_lifespan
from fastmcp.tools.function_tool import FunctionTool

from .prepared import PreparedTool

T = TypeVar("T")


class ServerTools:
    """Looks tools up in a FastMCP server, which may change while it is served."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self._prepared: dict[str, PreparedTool] = {}

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a function stands behind each tool."""
        server = self.server
        local = server.local_provider
        return (
            list(server.providers) == [local]
            and not server.transforms
            and not local.transforms
            and getattr(server, "_lifespan", None) is default_lifespan
            and not server.strict_input_validation
            and all(type(middleware) is DereferenceRefsMiddleware for middleware in server.middleware)
        )

    def find(self, name: str) -> PreparedTool | None:
        """Return a function tool of the server's own, whether or not it may be called directly."""
        tool = _finish(self.server.local_provider.get_tool(name))
        if not isinstance(tool, FunctionTool):
            return None
        prepared = self._prepared.get(name)
        if prepared is None or prepared.tool is not tool:
            prepared = self._prepared[name] = PreparedTool(tool)
        return prepared

    def has(self, name: str) -> bool:
        """Whether the server has a tool of its own by this name, of any kind."""
        return _finish(self.server.local_provider.get_tool(name)) is not None

    def local_tools(self) -> Sequence[Any]:
        """List the tools that the server was given directly, without an event loop."""
        tools: Sequence[Any] = _finish(self.server.local_provider.list_tools())
        return tools

    async def all_tools(self) -> Sequence[Any]:
        """List every tool, as FastMCP would, middleware and mounted servers included."""
        tools: Sequence[Any] = await self.server.list_tools()
        return tools


def is_unguarded(tool: PreparedTool) -> bool:
    """Whether a plain server's tool may be run by anybody and at once: no access check, no background task."""
    background = getattr(getattr(tool.tool, "task_config", None), "mode", "forbidden")
    return getattr(tool.tool, "auth", None) is None and background == "forbidden"


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("FastMCP's local provider waits for something; it cannot be asked without an event loop")
