"""The environment whose tool is called: it returns the message it is sent.

Written against the contract's names and FastMCP only, so that the published package and ours serve this very file.
"""

from __future__ import annotations

import os
from typing import Any

from fastmcp import FastMCP

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class ToolEnvironment(MCPEnvironment):
    """Offer one tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: Any = FastMCP("tools")

        @server.tool
        def echo(message: str) -> str:
            """Return the message."""
            return message

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Start an episode."""
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        """Return the running episode."""
        return self._state


app = create_app(
    ToolEnvironment,
    CallToolAction,
    CallToolObservation,
    env_name="tools",
    max_concurrent_envs=int(os.environ.get("BENCH_SESSIONS", "5000")),
)
