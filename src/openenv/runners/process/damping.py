"""When to start another worker after some have died for nothing. Knows times and numbers only."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class WorkersKeepDying(RuntimeError):
    """No worker is started for a while, since the last ones have died before they did anything."""


class Damping:
    """Counts the deaths of workers that have answered nothing; after some in a row, pauses grow.

    Args:
        clock: Tells the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._deaths = 0
        self._until = 0.0
        self._last = ""

    def answered(self) -> None:
        """Take note that a worker has done something useful."""
        if self._deaths:
            with self._lock:
                self._deaths = 0

    def died(self, how: str) -> None:
        """Take note that a worker has died without that."""
        with self._lock:
            self._deaths += 1
            self._last = how
            if self._deaths >= PATIENCE:
                pause = FIRST_PAUSE_S * 2 ** min(self._deaths - PATIENCE, 10)
                self._until = self._clock() + min(pause, LONGEST_PAUSE_S)

    def check(self) -> None:
        """Let a worker be started, or not.

        Raises:
            WorkersKeepDying: Not now.
        """
        with self._lock:
            left = self._until - self._clock()
            if self._deaths >= PATIENCE and left > 0:
                raise WorkersKeepDying(
                    f"the last {self._deaths} worker processes died before they answered anything (the last one: "
                    f"{self._last}); the next one is started in {left:.1f} s"
                )
