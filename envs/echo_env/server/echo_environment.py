"""The Echo environment: repeats each message and rewards its length."""

from __future__ import annotations

import uuid
from typing import Any

from echo_env.models import EchoAction, EchoObservation
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

REWARD_PER_CHARACTER = 0.1
MAX_REWARD = 1.0


class EchoEnvironment(Environment[EchoAction, EchoObservation, State]):
    """Repeats messages; an episode has no end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        """Begin an episode; there is nothing to seed."""
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        return EchoObservation(echoed_message="Echo environment ready!", reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        """Repeat the message."""
        self._state.step_count += 1
        length = len(action.message)
        return EchoObservation(
            echoed_message=action.message,
            message_length=length,
            reward=min(MAX_REWARD, REWARD_PER_CHARACTER * length),
        )

    @property
    def state(self) -> State:
        """The episode's name and its number of steps."""
        return self._state
