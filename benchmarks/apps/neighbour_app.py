"""An environment whose steps are fast, or hard on their neighbours: the action says which.

Written against the contract's names only, so that the published package and ours serve this very file.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import time
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SLOW_S, BUSY_S, SLOW_SHARE = 0.2, 0.05, 0.01


class NeighbourAction(Action):
    """Carry the message to be echoed, and the kind of work."""

    message: str = ""
    kind: str = "fast"


class NeighbourObservation(Observation):
    """Carry the echoed message."""

    echoed: str = ""


class NeighbourEnvironment(Environment[NeighbourAction, NeighbourObservation, State]):
    """Echo each message, after the work that its action names."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._database: sqlite3.Connection | None = None  # may be used in the thread that opened it only

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> NeighbourObservation:
        """Start an episode."""
        self._state = State(episode_id=episode_id, step_count=0)
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create table steps (message text)")
        return NeighbourObservation(reward=0.0)

    def step(self, action: NeighbourAction, timeout_s: float | None = None, **kwargs: Any) -> NeighbourObservation:
        """Do the work of a kind, then echo the message."""
        self._state.step_count += 1
        if action.kind == "random":
            time.sleep(SLOW_S if random.random() < SLOW_SHARE else 0)
        elif action.kind == "forever":
            signal.pause() if hasattr(signal, "pause") else time.sleep(3600)
        elif action.kind == "python":
            end = time.thread_time() + BUSY_S
            while time.thread_time() < end:
                pass
        elif action.kind == "sqlite":
            assert self._database is not None
            self._database.execute("insert into steps values (?)", (action.message,))
        elif action.kind == "asyncio":
            asyncio.run(asyncio.sleep(0))
        return NeighbourObservation(echoed=action.message, reward=1.0)

    @property
    def state(self) -> State:
        """Return the episode's id and step count."""
        return self._state

    def close(self) -> None:
        """Close the database."""
        if self._database is not None:
            self._database.close()


app = create_app(
    NeighbourEnvironment,
    NeighbourAction,
    NeighbourObservation,
    env_name="neighbour",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "5000")),
)
