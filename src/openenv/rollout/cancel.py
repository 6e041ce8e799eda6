"""Cancelling: one object that any thread may set and that a rollout listens to.

Knows callbacks only. What a cancel ends is registered by whoever started it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openenv.errors import RolloutCancelled

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
