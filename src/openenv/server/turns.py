"""Turns of an event loop's connections: one long piece of work a pass, so that its answer goes out before the next.

A loop writes at the end of a pass. With several of them in one pass nobody would hear of the first before the last is
done, and those who wait for the answers would have nothing to do meanwhile. Knows callables only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from ..runners import loop_local

logger = logging.getLogger(__name__)


class Turns:
    """Whose turn it is on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Turns:
        """Return the loop's own turns."""
        return loop_local(loop, cls, lambda: cls(loop))

    def take(self) -> bool:
        """Take this pass, unless somebody has it or waits for it."""
        if self._is_taken:
            return False
        self._is_taken = True
        self._loop.call_soon(self._pass_on)
        return True

    def wait(self, action: Callable[[], None]) -> None:
        """Have something done in a later pass, in order; only for whoever could not `take` this one."""
        self._waiting.append(action)

    def _pass_on(self) -> None:
        if not self._waiting:
            self._is_taken = False
            return
        self._loop.call_soon(self._pass_on)
        try:
            self._waiting.popleft()()
        except Exception:
            logger.exception("a message could not be handled in its turn")
