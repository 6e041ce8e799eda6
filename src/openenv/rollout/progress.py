"""A running rollout as its caller meets it: events of its progress, one request to stop it, and its time limits.

Knows callbacks and clocks only; every folder of `rollout` may use it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel

from openenv.errors import RolloutCancelled

logger = logging.getLogger(__name__)

_LOOK_S = 1.0

Phase = Literal["sandbox", "setup", "agent", "collect", "verify", "store", "done"]
"""The phases of a rollout in their order."""


class Progress(BaseModel):
    """An event of a running rollout: the start of a phase, the end of a command, a model call."""

    rollout_id: str
    phase: Phase
    message: str = ""
    turn: int | None = None
    elapsed_s: float = 0.0
    facts: dict[str, Any] | None = None
    """The result of a setup line, or of a command that an agent's loop ran."""


OnProgress = Callable[[Progress], None]
"""Receives the events of rollouts."""


class Reporter:
    """Sends the events of one rollout, one at a time, and measures its phases.

    Args:
        rollout_id: The rollout.
        callbacks: Receive each event in the rollout's threads, one call at a time. Their exceptions are logged.
        lock: Shared by rollouts with the same callbacks.
    """

    def __init__(self, rollout_id: str, *callbacks: OnProgress | None, lock: threading.Lock | None = None) -> None:
        self._rollout_id = rollout_id
        self._callbacks = [callback for callback in callbacks if callback is not None]
        self._lock = lock or threading.Lock()
        self._began = time.monotonic()
        self.phase: Phase = "sandbox"
        self.phase_s: dict[str, float] = {}
        self.journal: OnProgress | None = None
        """Writes the events to disk."""

    @property
    def elapsed_s(self) -> float:
        """The seconds since the rollout started."""
        return time.monotonic() - self._began

    @contextmanager
    def during(self, phase: Phase, message: str = "") -> Iterator[None]:
        """Report the start of a phase, and measure the block."""
        self.phase = phase
        began = time.monotonic()
        self.say(message)
        try:
            yield
        finally:
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + time.monotonic() - began

    def say(self, message: str, *, turn: int | None = None, facts: dict[str, Any] | None = None) -> None:
        """Send an event of the current phase."""
        callbacks = self._callbacks if self.journal is None else [self.journal, *self._callbacks]
        if not callbacks:
            return
        event = Progress(
            rollout_id=self._rollout_id,
            phase=self.phase,
            message=message,
            turn=turn,
            elapsed_s=self.elapsed_s,
            facts=facts,
        )
        with self._lock:
            for callback in callbacks:
                try:
                    callback(event)
                except Exception:  # the caller's code must not end the rollout
                    logger.exception("a progress callback failed")


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


class Alarms:
    """Calls back when a time is over, unless the block that has so much time has ended.

    One thread waits for all blocks of all rollouts, because a thread for each costs more than most blocks. It ends soon
    after the last block.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alarms: dict[int, tuple[float, Callable[[], object]]] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._looks_at = 0.0

    @contextmanager
    def after(self, seconds: float, callback: Callable[[], object]) -> Iterator[None]:
        """Call back once, in a thread of its own, if the block takes longer; the end of the block does not wait."""
        number, due = next(self._numbers), time.monotonic() + seconds
        with self._changed:
            self._alarms[number] = due, callback
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="openenv-alarms", daemon=True)
                self._thread.start()
            elif due < self._looks_at:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._alarms.pop(number, None)

    def _wait(self) -> None:
        with self._changed:
            while self._alarms:
                now = time.monotonic()
                for number in [number for number, (due, _) in self._alarms.items() if due <= now]:
                    _, callback = self._alarms.pop(number)
                    threading.Thread(target=callback, name="openenv-alarm", daemon=True).start()
                self._looks_at = min([now + _LOOK_S, *(due for due, _ in self._alarms.values())])
                self._changed.wait(self._looks_at - now)
            self._thread = None
