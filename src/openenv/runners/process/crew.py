"""Threads for calls that wait: one each, kept for a while for the next one. Knows callables only."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

_KEPT_S = 5.0


class Crew:
    """Runs each call at once, in a thread that has nothing to do or in a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._idle = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self, call: Callable[[], None]) -> None:
        """Run a call."""
        with self._lock:
            has_idle = self._idle > 0
            if has_idle:
                self._idle -= 1
        if has_idle:
            self._calls.put(call)
        else:
            # Daemons: a worker that does not answer must not keep the server from ending.
            name = f"{self._name}-{next(self._numbers)}"
            threading.Thread(target=self._work, args=(call,), name=name, daemon=True).start()

    def _work(self, call: Callable[[], None]) -> None:
        while True:
            try:
                call()
            except BaseException:
                logger.exception("a call broke its promise not to raise")
            del call
            with self._lock:
                self._idle += 1
            try:
                call = self._calls.get(timeout=_KEPT_S)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                call = self._calls.get()  # somebody has just counted on this thread
