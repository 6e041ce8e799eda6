"""The way back from worker threads to an event loop, many results at a time.

One hub per loop. Knows callables; must not know what they mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .loop_local import loop_local

logger = logging.getLogger(__name__)


class Delivery(Protocol):
    """Something to be handed over on the loop."""

    def deliver(self) -> None:
        """Hand it over; called on the loop."""
        ...


class Hub:
    """Delivers results on one loop; a burst of them costs one wake-up."""

    __slots__ = ("__weakref__", "_ready", "_scheduled", "after_delivery", "is_delivering", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ready: deque[Delivery] = deque()
        self._scheduled = False
        self.is_delivering = False
        self.after_delivery: Callable[[], None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this hub's loop."""
        return asyncio._get_running_loop() is self.loop

    def post(self, delivery: Delivery) -> None:
        """Deliver soon, on the loop; may be called from any thread. A closed loop has nobody left to tell."""
        self._ready.append(delivery)
        if not self._scheduled:
            self._scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                self._ready.clear()

    def _drain(self) -> None:
        # The flag falls before the queue is emptied: whoever appends after that schedules another pass.
        self._scheduled = False
        ready = self._ready
        self.is_delivering = True
        for _ in range(len(ready)):
            delivery = ready.popleft()
            try:
                delivery.deliver()
            except Exception:
                logger.exception("a result could not be delivered")
        self.is_delivering = False
        if self.after_delivery is not None:
            self.after_delivery()
        if ready and not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._drain)


def current_hub() -> Hub:
    """Return the hub of the running loop."""
    loop = asyncio.get_running_loop()
    return loop_local(loop, Hub, lambda: Hub(loop))
