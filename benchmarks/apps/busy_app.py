"""An environment that computes: each step is about 2 ms of pure Python, which holds the interpreter all the time.

For comparing the runners `thread` and `process`; `BUSY_LOOPS` sets how long a step takes.
"""

from __future__ import annotations

import os
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

LOOPS = int(os.environ.get("BUSY_LOOPS", "18000"))


class BusyAction(Action):
    """Carry the message to be echoed."""

    message: str


class BusyObservation(Observation):
    """Carry the echoed message."""

    echoed: str = ""


class BusyEnvironment(Environment[BusyAction, BusyObservation, State]):
    """Compute for a while, then return the message."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> BusyObservation:
        """Start an episode."""
        self._state = State(episode_id=episode_id, step_count=0)
        return BusyObservation(reward=0.0)

    def step(self, action: BusyAction, timeout_s: float | None = None, **kwargs: Any) -> BusyObservation:
        """Compute."""
        self._state.step_count += 1
        total = 0
        for number in range(LOOPS):
            total = (total + number * number) % 1_000_003
        return BusyObservation(echoed=action.message, reward=float(total))

    @property
    def state(self) -> State:
        """Return the episode's id and step count."""
        return self._state


app = create_app(BusyEnvironment, BusyAction, BusyObservation, env_name="busy", max_concurrent_envs=1024)
