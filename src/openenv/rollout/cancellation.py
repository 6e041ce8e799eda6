"""`Cancellation`: one request to stop a rollout, made by any thread.

Knows callbacks only; every folder of `rollout` may use it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openenv.errors import RolloutCancelled

logger = logging.getLogger(__name__)


class Cancellation:
    """A request to stop, made once and by any thread.

    A rollout registers callbacks that end its waiting; `cancel` calls them, so nothing polls.
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
        """The reason for the cancellation, or an empty text."""
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
            RolloutCancelled: `cancel` was called; the text is the reason.
        """
        if self._event.is_set():
            raise RolloutCancelled(self._reason)

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call back on a cancellation while the block runs; immediately if it has happened already."""
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
