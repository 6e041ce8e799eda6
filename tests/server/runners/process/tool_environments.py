"""Environments with tools for the tests of the process runner: workers import this file."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from fastmcp import Context, FastMCP

from openenv.env.environment import Environment
from openenv.env.mcp_environment import MCPEnvironment
from openenv.types import Action, Observation, State


def new_server() -> FastMCP:
    """Return a server with some tools, a resource and a prompt."""
    server = FastMCP("perils", instructions="Mind the gap.")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @server.tool
    def where() -> int:
        """Tell the process."""
        return os.getpid()

    @server.tool
    def die() -> int:
        """Kill the process."""
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    @server.tool
    def spin(seconds: float) -> str:
        """Take long, in Python."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        return "done"

    @server.tool
    def fail() -> str:
        """Fail."""
        raise ValueError("out of paint")

    @server.tool
    async def count(to: int, ctx: Context) -> int:
        """Count aloud."""
        for number in range(1, to + 1):
            await ctx.report_progress(number, to, f"at {number}")
            await asyncio.sleep(0)
        return to

    @server.resource("perils://list")
    def perils() -> str:
        return "cliff, river"

    @server.prompt
    def advise(place: str) -> str:
        return f"How to cross {place}?"

    return server


class Toolbox(MCPEnvironment):
    """Its actions are tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(new_server())
        self._episode = State()
        self.tool("production")(self._only_in_production)

    @staticmethod
    def _only_in_production() -> str:
        return "production"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._episode = State(episode_id=episode_id)
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(reward=1.0)

    @property
    def state(self) -> State:
        return self._episode


class BringsServer(Environment[Action, Observation, State]):
    """Has a FastMCP server, and no tool actions."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.mcp_server = new_server()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()
