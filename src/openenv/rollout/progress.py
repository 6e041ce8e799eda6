"""Cancelling: one object that any thread may set and that a rollout listens to.

Knows callbacks only. What a cancel ends is registered by whoever started it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openenv.errors import RolloutCancelled
from openenv.rollout.outcome import Phase, Progress

logger = logging.getLogger(__name__)


class Cancellation:
    """A request to stop, which can be made once and from any thread.

    A rollout registers how to end what it waits for; `cancel` calls that, so nothing has to be polled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._reason = ""
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._next = 0

    @property
    def cancelled(self) -> bool:
        """Say whether `cancel` was called."""
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Return the reason that was given, or nothing."""
        return self._reason

    def cancel(self, reason: str = "cancelled by the caller") -> None:
        """Stop everything that listens; later calls change nothing."""
        with self._lock:
            if self._event.is_set():
                return
            self._reason = reason
            self._event.set()
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            try:
                callback()
            except Exception:  # each of the others must still be told
                logger.exception("a rollout could not be stopped")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is cancelled, and say whether it was."""
        return self._event.wait(timeout)

    def check(self) -> None:
        """Return when nothing was cancelled.

        Raises:
            RolloutCancelled: it was.
        """
        if self._event.is_set():
            raise RolloutCancelled(self._reason)

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call back when it is cancelled while the block runs; at once when it already is."""
        with self._lock:
            number = self._next
            self._next += 1
            self._callbacks[number] = callback
            late = self._event.is_set()
        try:
            if late:
                callback()
            yield
        finally:
            with self._lock:
                del self._callbacks[number]


# progress: Progress: what a running rollout tells its caller while it runs.
#
# Knows events and clocks. A callback that fails is logged and never ends a rollout.


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
