"""What a caller holds while a rollout runs: a `Cancellation` to end it, and the events that a `Reporter` sends.

Knows callbacks and clocks only.
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

OnProgress = Callable[[Progress], None]


class Cancellation:
    """A request to stop, which can be made once and from any thread.

    A rollout registers how to end what it waits for; `cancel` calls that, so nothing has to be polled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._reason = ""
        self._callbacks: list[Callable[[], object]] = []

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """The reason for the cancellation, or nothing."""
        return self._reason

    def cancel(self, reason: str = "cancelled by the caller") -> None:
        """Stop everything that listens; later calls change nothing."""
        with self._lock:
            if self._event.is_set():
                return
            self._reason = reason
            self._event.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the other callbacks must still run
                logger.exception("a rollout could not be stopped")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a cancellation, and return whether there was one."""
        return self._event.wait(timeout)

    def check(self) -> None:
        """Raise if `cancel` was called.

        Raises:
            RolloutCancelled: it was; the text is the reason.
        """
        if self._event.is_set():
            raise RolloutCancelled(self._reason)

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call back on a cancellation while the block runs; at once if there was one already."""
        with self._lock:
            self._callbacks.append(callback)
            late = self._event.is_set()
        try:
            if late:
                callback()
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)


class Reporter:
    """Sends the events of one rollout, one at a time, and measures its phases.

    Args:
        rollout_id: Whose events these are.
        callbacks: Get each event, in the rollout's threads; calls never overlap. One that raises is logged.
        lock: Shared by the rollouts that share a callback.
    """

    def __init__(self, rollout_id: str, *callbacks: OnProgress | None, lock: threading.Lock | None = None) -> None:
        self._rollout_id = rollout_id
        self._callbacks = [callback for callback in callbacks if callback is not None]
        self._lock = lock or threading.Lock()
        self._began = time.monotonic()
        self.phase: Phase = "sandbox"
        self.phase_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """The seconds since the rollout began."""
        return time.monotonic() - self._began

    @contextmanager
    def during(self, phase: Phase, message: str = "") -> Iterator[None]:
        """Report that a phase begins, and measure the block."""
        self.phase = phase
        began = time.monotonic()
        self.say(message)
        try:
            yield
        finally:
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + time.monotonic() - began

    def say(self, message: str, *, turn: int | None = None) -> None:
        """Send an event of the current phase."""
        if not self._callbacks:
            return
        event = Progress(
            rollout_id=self._rollout_id, phase=self.phase, message=message, turn=turn, elapsed_s=self.elapsed_s
        )
        with self._lock:
            for callback in self._callbacks:
                try:
                    callback(event)
                except Exception:  # the caller's code must not end the rollout
                    logger.exception("a progress callback failed")
