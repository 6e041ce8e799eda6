"""The counter's server: the environment and its application."""

from __future__ import annotations

import os
import sys
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment

from .models import CounterAction, CounterObservation, CounterState


class CounterEnvironment(Environment[CounterAction, CounterObservation, CounterState]):
    """Adds up; an episode is over at ten or more."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    built = 0

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("COUNTER_IS_BROKEN") and not self._is_of_the_start():
            raise OSError("the counter is broken")
        self._seed: int | None = None
        self._state = CounterState()

    @classmethod
    def _is_of_the_start(cls) -> bool:
        """Whether this is the one that `openenv serve` builds at the start; a broken one would end it."""
        cls.built += 1
        return "serve" in sys.argv and cls.built == 1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CounterObservation:
        self._seed = seed
        self._state = CounterState(episode_id=episode_id, total=kwargs.get("start", 0))
        return CounterObservation(total=self._state.total, seed=seed, metadata={"extra": sorted(kwargs)})

    def step(self, action: CounterAction, timeout_s: float | None = None, **kwargs: Any) -> CounterObservation:
        if action.fail:
            raise ValueError(action.fail)
        state = self._state
        state.step_count += 1
        state.total += action.amount
        state.amounts.append(action.amount)
        return CounterObservation(total=state.total, seed=self._seed, reward=action.amount / 2, done=state.total >= 10)

    @property
    def state(self) -> CounterState:
        return self._state


app = create_app(
    CounterEnvironment,
    CounterAction,
    CounterObservation,
    env_name="counter_env",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "1")),
    state_cls=CounterState,
)
