"""The environment under test: it returns the message it is sent.

Written against the contract's names only, so that the published package and ours serve this very file.
"""

from __future__ import annotations

import os
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    """Carry the message to be echoed."""

    message: str


class EchoObservation(Observation):
    """Carry the echoed message."""

    echoed: str = ""


class EchoEnvironment(Environment[EchoAction, EchoObservation, State]):
    """Return each message unchanged with a reward of 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        """Start an episode."""
        self._state = State(episode_id=episode_id, step_count=0)
        return EchoObservation(echoed="", reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        """Echo the message."""
        self._state.step_count += 1
        return EchoObservation(echoed=action.message, reward=1.0)

    @property
    def state(self) -> State:
        """Return the episode's id and step count."""
        return self._state


app = create_app(
    EchoEnvironment,
    EchoAction,
    EchoObservation,
    env_name="echo",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "5000")),
)
