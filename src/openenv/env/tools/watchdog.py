"""Deadlines of calls that run in threads, watched from the tool loop.

Setting and lifting one costs a dictionary entry; the loop looks at them a few times a second, and not at all while
there are none. Knows callbacks only.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .loop import TOOL_LOOP, BackgroundLoop

logger = logging.getLogger(__name__)

PERIOD_S = 0.05
_PATIENCE = 40  # looks at nothing before it stops looking


class Watchdog:
    """Calls back when time is up."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self._loop = loop
        self._watched: dict[object, tuple[float, Callable[[], None]]] = {}
        self._looking = False
        self._idle = 0
        self._pid = os.getpid()

    @contextmanager
    def limit(self, seconds: float, on_late: Callable[[], None]) -> Iterator[None]:
        """Call `on_late` on the tool loop if the block takes longer."""
        if self._pid != os.getpid():  # a forked child: nobody looks there, and what the parent runs is not its own
            self._pid, self._looking = os.getpid(), False
            self._watched.clear()
        key = object()
        self._watched[key] = (time.monotonic() + seconds, on_late)
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)
        try:
            yield
        finally:
            self._watched.pop(key, None)

    def _look(self) -> None:
        now = time.monotonic()
        for key, (deadline, on_late) in list(self._watched.items()):
            if deadline <= now and self._watched.pop(key, None) is not None:
                self._tell(on_late)
        self._idle = 0 if self._watched else self._idle + 1
        if self._idle > _PATIENCE:
            self._looking = False
            if not self._watched:  # one that came just now may have seen us looking
                return
            self._looking = True
        self._loop.call_later(PERIOD_S, self._look)

    @staticmethod
    def _tell(on_late: Callable[[], None]) -> None:
        try:
            on_late()
        except Exception:  # the other deadlines must be kept all the same
            logger.exception("a call whose time is up could not be stopped")


WATCHDOG = Watchdog(TOOL_LOOP)
