"""Stubs of an environment in a worker, of its tools, and of the FastMCP client of its server.

They implement the methods that sessions and surfaces call. The lane sends the requests to the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openenv.env.binding import Encoder, RemoteEnvironment, RemoteOperation
from openenv.env.tools.source import EVENTS, ToolRequest, ToolSource

from .messages import EnvironmentDescription

if TYPE_CHECKING:
    from .runner import ProcessLane


class ToolsStub(ToolSource):
    """The tools of an environment in a worker."""

    def __init__(self, lane: ProcessLane, instructions: str | None) -> None:
        self._lane = lane
        self.instructions = instructions

    async def describe(self) -> list[dict[str, Any]]:
        """List the tools as MCP's `tools/list` does."""
        tools: list[dict[str, Any]] = await self._lane.ask("describe", None)
        return tools

    async def call(self, request: ToolRequest) -> Any:
        """Call a tool; raises `ToolCallError` and its subclasses."""
        argument = (request.name, dict(request.arguments), request.timeout_s)
        return await self._lane.ask("tool", argument, events=request.events)

    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run `work` with a stub of the server's FastMCP client."""
        return await work(McpClientStub(self._lane))


class McpClientStub:
    """The FastMCP client of an environment's server; each method runs in the worker."""

    def __init__(self, lane: ProcessLane) -> None:
        self._lane = lane

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    async def _call(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        return await self._lane.ask("client", (name, arguments, keywords))


class EnvironmentStub(RemoteEnvironment):
    """An environment in a worker. Its own methods block, so call them from threads only."""

    tools: ToolSource | None
    mcp_server: Any

    def __init__(self, lane: ProcessLane, description: EnvironmentDescription) -> None:
        self._lane = lane
        self._description = description
        self._methods = description.methods
        self._served_mode: str | None = None
        self.served_class = description.served_class()
        self.tools = ToolsStub(lane, description.instructions) if description.has_tools else None
        self.mcp_server = None
        if description.has_server:
            self.mcp_server = ToolsStub(lane, description.instructions)
        elif description.has_tools:
            self.mcp_server = SimpleNamespace(instructions=description.instructions)  # the only known attribute

    async def ask(self, operation: RemoteOperation, argument: Any, encode: Encoder | None = None) -> Any:
        """Run an operation in the worker and return its result, encoded."""
        return await self._lane.ask(operation, argument, encode=encode)

    def copied_to(self, lane: ProcessLane) -> EnvironmentStub:
        """Return the stub of a copy, in the same mode."""
        stub = EnvironmentStub(lane, self._description)
        stub._served_mode = self._served_mode
        return stub

    def restore_pickled(self, state: bytes) -> None:
        """Put the environment into the state of a pickled snapshot; blocks."""
        self._lane.ask_blocking("restore", state)

    async def reset_async(self, **kwargs: Any) -> Any:
        """Begin an episode."""
        return await self._lane.ask("reset", kwargs)

    async def step_async(self, action: Any, **kwargs: Any) -> Any:
        """Take an action; events of its tool go to the listener of the calling task."""
        if kwargs:
            return await self._lane.ask("step_with", (action, kwargs), events=EVENTS.get())
        return await self._lane.ask("step", action, events=EVENTS.get())

    async def close(self) -> None:
        """Close it."""
        await self._lane.close()

    @property
    def _mode(self) -> str | None:
        return self._served_mode

    @_mode.setter
    def _mode(self, mode: str | None) -> None:
        self._lane.ask_blocking("mode", mode)
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
        return self._lane.ask_blocking("method", (name, arguments, keywords))
