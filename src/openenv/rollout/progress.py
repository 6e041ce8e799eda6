"""Progress: what a running rollout tells its caller while it runs.

Knows events and clocks. A callback that fails is logged and never ends a rollout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openenv.rollout.outcome import Phase, Progress

logger = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]


class Reporter:
    """Sends the events of one rollout, one at a time, and measures its phases.

    Args:
        rollout_id: Whose events these are.
        callback: Gets each event; called from the rollout's threads, never twice at once.
        lock: Shared by the rollouts that share a callback.
    """

    def __init__(
        self, rollout_id: str, callback: OnProgress | None = None, *, lock: threading.Lock | None = None
    ) -> None:
        self._rollout_id = rollout_id
        self._callback = callback
        self._lock = lock or threading.Lock()
        self._began = time.monotonic()
        self.phase: Phase = "sandbox"
        self.phase_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the rollout began."""
        return time.monotonic() - self._began

    @contextmanager
    def during(self, phase: Phase, message: str = "") -> Iterator[None]:
        """Say that a phase begins, and note how long the block takes."""
        self.phase = phase
        began = time.monotonic()
        self.say(message)
        try:
            yield
        finally:
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + time.monotonic() - began

    def say(self, message: str, *, turn: int | None = None) -> None:
        """Send an event of the current phase."""
        if self._callback is None:
            return
        event = Progress(
            rollout_id=self._rollout_id, phase=self.phase, message=message, turn=turn, elapsed_s=self.elapsed_s
        )
        with self._lock:
            try:
                self._callback(event)
            except Exception:  # the caller's code must not end the rollout
                logger.exception("a progress callback failed")
