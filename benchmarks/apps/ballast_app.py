"""An environment with `BALLAST_MB` megabytes of its own, in pages that were all written."""

from __future__ import annotations

import os
from typing import Any

from openenv import Action, Environment, Observation, State, create_app


class Step(Action):
    """Does nothing."""


class Count(Observation):
    """How many steps were taken, and a byte of the ballast."""

    steps: int = 0
    byte: int = 0


class Ballast(Environment[Step, Count, State]):
    """Counts steps, and changes a page of its ballast with each."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._pages = bytearray(b"x" * (int(os.environ.get("BALLAST_MB", "64")) << 20))
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Count:
        """Start to count."""
        self._steps = 0
        return Count()

    def step(self, action: Step, timeout_s: float | None = None, **kwargs: Any) -> Count:
        """Count a step."""
        self._steps += 1
        place = self._steps * 4096 % len(self._pages)
        self._pages[place] = self._steps % 256
        return Count(steps=self._steps, byte=self._pages[place])

    @property
    def state(self) -> State:
        """Return the number of steps."""
        return State(step_count=self._steps)


app = create_app(Ballast, Step, Count, max_concurrent_envs=512)
