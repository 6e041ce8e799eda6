"""Tools of an environment as an MCP server on loopback, for the agent's process.

The server forwards each call to a function, which may run in another thread. Knows FastMCP and sockets; must not know
environments or agents.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastmcp import FastMCP
from fastmcp.tools import Tool as FastMcpTool
from fastmcp.tools.base import ToolResult
from mcp.types import ContentBlock as McpContent
from pydantic import PrivateAttr, TypeAdapter

from openenv.env.tools.source import ToolOutcome, ToolRequest
from openenv.env.tools.tool_registry import ToolRegistry
from openenv.errors import HarnessError, HarnessStartupError, ToolCallError
from openenv.server.thread_server import ThreadServer

logger = logging.getLogger(__name__)

CallTool = Callable[[ToolRequest], Awaitable[ToolOutcome]]
# Blocks arrive as plain dicts and become MCP's models again.
_CONTENT: TypeAdapter[Any] = TypeAdapter(McpContent)
_GRACE_S = 1


class ForwardedTool(FastMcpTool):
    """A tool that another server, or another loop, runs under its own name."""

    _call: CallTool = PrivateAttr()
    _original: str = PrivateAttr()

    @classmethod
    def made(cls, name: str, described: Mapping[str, Any], call: CallTool) -> ForwardedTool:
        """Make one from what `tools/list` says of a tool.

        Args:
            name: What agents call it.
            described: The tool, as MCP describes it.
            call: Runs it.
        """
        tool = cls(
            name=name,
            title=described.get("title"),
            description=described.get("description"),
            parameters=described.get("inputSchema") or {"type": "object", "properties": {}},
            output_schema=described.get("outputSchema"),
            annotations=described.get("annotations"),
        )
        # Private attributes of a pydantic model cannot be passed to its constructor.
        tool._call, tool._original = call, described["name"]
        return tool

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        """Forward the call to the environment."""
        try:
            outcome = await self._call(ToolRequest(self._original, arguments))
        except ToolCallError as exc:  # not as an exception, which FastMCP would log as a defect
            return ToolResult(content=str(exc), is_error=True)
        return ToolResult(
            # Images and resources pass through unchanged.
            content=[_CONTENT.validate_python(block.as_mcp()) for block in outcome.content],
            structured_content=outcome.structured_content,
            meta=outcome.meta,
            is_error=outcome.is_error,
        )


def forwarding_server(
    name: str, described: Sequence[Mapping[str, Any]], renames: Mapping[str, str], call: CallTool
) -> FastMCP[Any]:
    """Build a server that forwards its tools to a function.

    Args:
        name: The server's name.
        described: The tools, as MCP describes them.
        renames: What agents call a tool, to its own name; the others keep theirs.
        call: Runs a tool under its own name.

    Raises:
        HarnessError: A renamed tool does not exist, or two tools would have one name.
    """
    # Names are the tools' identity in MCP.
    by_name = {str(tool["name"]): tool for tool in described}
    missing = sorted(set(renames.values()) - set(by_name))
    if missing:
        raise HarnessError(f"Cannot rename tools that the MCP server does not expose: {', '.join(missing)}")
    plain_names = [tool for tool in by_name if tool not in renames.values()]
    # Example: renaming bash to env_bash fails if the environment has an env_bash already.
    taken = sorted(set(plain_names) & set(renames))
    if taken:
        raise HarnessError(f"Two tools would have the same name: {', '.join(taken)}")
    server: FastMCP[Any] = FastMCP(name)
    for exposed, original in {**{tool: tool for tool in plain_names}, **renames}.items():
        server.add_tool(ForwardedTool.made(exposed, by_name[original], call))
    return server


async def build_bridge_server(mcp_server: Any, renames: Mapping[str, str]) -> Any:
    """Return a FastMCP server with the tools of another, some under other names.

    Args:
        mcp_server: The FastMCP server that has the tools.
        renames: What agents call a tool, to its own name; without any, the server itself is returned.

    Raises:
        HarnessError: A renamed tool does not exist, or two tools would have one name.
    """
    # No conflict, no wrapper: calls stay as fast as on the server itself.
    if not renames:
        return mcp_server
    registry = ToolRegistry(mcp_server)
    return forwarding_server(f"{mcp_server.name}-harness-view", await registry.describe(), renames, registry.call)


class HarnessMCPBridge:
    """Serves a FastMCP server over Streamable HTTP from a thread; its address is a secret that only the agent is given.

    Args:
        mcp_server: The FastMCP server.
        host: The address to bind, on any free port.
    """

    def __init__(self, mcp_server: Any, host: str = "127.0.0.1") -> None:
        self._mcp_server = mcp_server
        self._host = host
        self._server: ThreadServer | None = None
        self._path = ""
        self._lock = threading.Lock()  # if its caller is cancelled, `start` continues, and `stop` has to wait for it

    @property
    def url(self) -> str | None:
        """The address of the tools; None while the server is stopped."""
        return None if self._server is None else f"{self._server.url}{self._path}"

    def start(self, timeout_s: float = 10.0) -> str:
        """Serve, and return the address once it answers; again while it runs, the same address.

        Raises:
            HarnessStartupError: It did not answer in time.
            OSError: The address cannot be bound.
        """
        with self._lock:
            if self._server is None:
                self._server = self._serve(timeout_s)
            assert self.url is not None
            return self.url

    def _serve(self, timeout_s: float) -> ThreadServer:
        # Other agents of the machine can reach the port, but they cannot guess the path.
        self._path = f"/{secrets.token_urlsafe(18)}/mcp"
        # The secret is part of the path, because agents' MCP settings always carry a URL.
        app = self._mcp_server.http_app(path=self._path)
        server = ThreadServer(app, host=self._host, lifespan="on", timeout_graceful_shutdown=_GRACE_S)
        try:
            server.start(timeout_s)
        except RuntimeError as exc:
            raise HarnessStartupError(f"the bridge to the environment's tools did not start: {exc}") from exc
        return server

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving; calls that run are cancelled."""
        with self._lock:
            # Forget it first, so that a failing close does not leave a dead server behind.
            server, self._server = self._server, None
            if server is not None:
                server.close(timeout_s)
