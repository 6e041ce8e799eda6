"""The Echo environment: two tools that repeat what they get, and a plain message that earns a reward."""

from __future__ import annotations

import uuid
from typing import Any

from fastmcp import FastMCP
from typing_extensions import TypedDict

from echo_env.models import EchoAction, EchoObservation
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State

READY = "Echo environment ready!"
_REWARD_PER_CHARACTER, _HIGHEST_REWARD = 0.1, 1000.0


class Echoed(TypedDict):
    """A message and its length."""

    message: str
    length: int


class EchoEnvironment(MCPEnvironment):
    """Repeats messages; an episode has no end. Calls of tools earn nothing, plain messages by their length."""

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
        return EchoObservation(echoed_message=READY, reward=0.0, metadata={"status": "ready", "message": READY})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """List the tools, call one, or repeat a plain message."""
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **kwargs)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        if isinstance(action, EchoAction):
            length = len(action.message)
            reward = min(_REWARD_PER_CHARACTER * length, _HIGHEST_REWARD)
            return EchoObservation(echoed_message=action.message, message_length=length, reward=reward)
        error = f"{type(action).__name__} is no action of this environment: list its tools, call one, or send a message"
        return Observation(reward=0.0, metadata={"error": error})

    @property
    def state(self) -> State:
        """The episode's name and its number of steps."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(name="echo_env", description="Repeats what it gets.", version="0.11.0")


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
