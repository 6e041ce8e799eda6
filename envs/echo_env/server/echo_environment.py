"""The Echo environment: two tools that repeat what they get. Knows tools; must not know who calls them."""

from __future__ import annotations

import uuid
from typing import Any

from fastmcp import FastMCP
from typing_extensions import TypedDict

from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State


class Echoed(TypedDict):
    """A message and its length."""

    message: str
    length: int


class EchoEnvironment(MCPEnvironment):
    """Repeats messages; an episode has no end and no reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("echo_env")
        server.tool(echo_message)
        server.tool(echo_with_length)
        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Begin an episode; there is nothing to seed."""
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        return Observation(reward=0.0, metadata={"status": "ready", "message": "Echo environment ready!"})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """List the tools, or call one."""
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **kwargs)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        error = f"{type(action).__name__} is no action of this environment: list its tools, or call one"
        return Observation(reward=0.0, metadata={"error": error})

    @property
    def state(self) -> State:
        """The episode's name and its number of steps."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="echo_env", description="Two tools that repeat what they get.", version="0.11.0"
        )


def echo_message(message: str) -> str:
    """Repeat a message.

    Args:
        message: What to repeat.
    """
    return message


def echo_with_length(message: str) -> Echoed:
    """Repeat a message and count its characters.

    Args:
        message: What to repeat.
    """
    return Echoed(message=message, length=len(message))
