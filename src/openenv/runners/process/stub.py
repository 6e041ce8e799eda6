"""Stand-ins for an environment in a worker, for its tools, and for the FastMCP client of its server.

Knows what sessions and surfaces call; how requests reach the worker is the lane's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from ...env.binding import Encoder, RemoteEnvironment, RemoteOperation, step_argument
from ...env.tools.source import EVENTS, ToolEvents, ToolSource
from .messages import EnvironmentDescription


class Way(Protocol):
    """The way to one environment."""

    async def ask(
        self, name: str, argument: Any, *, encode: Encoder | None = None, events: ToolEvents | None = None
    ) -> Any:
        """Ask for something and wait, on the event loop."""
        ...

    def ask_blocking(self, name: str, argument: Any) -> Any:
        """Ask for something and wait, in this thread."""
        ...

    async def close(self) -> None:
        """Have the environment closed."""
        ...


class ToolsStub(ToolSource):
    """The tools of an environment in a worker."""

    def __init__(self, way: Way, instructions: str | None) -> None:
        self._way = way
        self.instructions = instructions

    async def describe(self) -> list[dict[str, Any]]:
        """List the tools as MCP's `tools/list` does."""
        found: list[dict[str, Any]] = await self._way.ask("describe", None)
        return found

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        events: ToolEvents | None = None,
    ) -> Any:
        """Call a tool; raises `ToolCallError` and its kind."""
        return await self._way.ask("tool", (name, dict(arguments), timeout_s), events=events)

    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with what stands for FastMCP's client of the server."""
        return await work(McpClientStub(self._way))


class McpClientStub:
    """Stands for FastMCP's client of an environment's server: each method is called over there."""

    def __init__(self, way: Way) -> None:
        self._way = way

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    async def _call(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        return await self._way.ask("client", (name, arguments, keywords))


class _ServerInfo:
    """What is known of the FastMCP server of an environment with tools."""

    def __init__(self, instructions: str | None) -> None:
        self.instructions = instructions


class EnvironmentStub(RemoteEnvironment):
    """Stands for an environment in a worker. Methods of its own can be called, from threads only: they wait."""

    tools: ToolSource | None
    mcp_server: Any

    def __init__(self, way: Way, description: EnvironmentDescription) -> None:
        self._way = way
        self._methods = description.methods
        self._served_mode: str | None = None
        self.served_class = description.served_class()
        self.tools = ToolsStub(way, description.instructions) if description.has_tools else None
        self.mcp_server = None
        if description.has_server:
            self.mcp_server = ToolsStub(way, description.instructions)
        elif description.has_tools:
            self.mcp_server = _ServerInfo(description.instructions)

    async def ask(self, operation: RemoteOperation, argument: Any, encode: Encoder | None = None) -> Any:
        """Do an operation there and return its result, encoded."""
        return await self._way.ask(operation, argument, encode=encode)

    async def reset_async(self, **kwargs: Any) -> Any:
        """Begin an episode."""
        return await self._way.ask("reset", kwargs)

    async def step_async(self, action: Any, **kwargs: Any) -> Any:
        """Take an action; what its tool tells goes to whoever listens here."""
        if kwargs:
            return await self._way.ask("step_with", step_argument(action, kwargs), events=EVENTS.get())
        return await self._way.ask("step", action, events=EVENTS.get())

    async def close(self) -> None:
        """Close it."""
        await self._way.close()

    @property
    def _mode(self) -> str | None:
        return self._served_mode

    @_mode.setter
    def _mode(self, mode: str | None) -> None:
        self._way.ask_blocking("mode", mode)
        self._served_mode = mode

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name not in self.__dict__.get("_methods", ()):
            raise AttributeError(
                f"{type(self).__name__!r} has no {name!r}: the environment is in a worker process, where only its "
                "methods can be called"
            )
        return partial(self._call, name)

    def _call(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{name} of an environment in a worker process would block the event loop")
        return self._way.ask_blocking("method", (name, arguments, keywords))
