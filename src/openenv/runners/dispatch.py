"""The way back from worker threads to an event loop: `Dispatcher` delivers many results with one wake-up.

There is one dispatcher per loop, kept on the loop itself: a table beside it would keep every loop alive that ever was.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTRIBUTE = "_openenv_objects"


def loop_local(loop: asyncio.AbstractEventLoop, kind: type[T], make: Callable[[], T]) -> T:
    """Return the loop's own object of a kind, made at the first call; it lives as long as the loop."""
    objects: dict[type[Any], Any] | None = getattr(loop, _ATTRIBUTE, None)
    if objects is None:
        objects = {}
        setattr(loop, _ATTRIBUTE, objects)
    own: T | None = objects.get(kind)
    if own is None:
        own = objects[kind] = make()
    return own


class Delivery(Protocol):
    """A result on its way to the loop."""

    def deliver(self) -> None:
        """Hand it over; called on the loop."""
        ...


class Dispatcher:
    """Delivers results on one loop; a burst of them costs one wake-up."""

    __slots__ = ("__weakref__", "_due", "_ready", "_scheduled", "_thread", "after_delivery", "is_delivering", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ready: deque[Delivery] = deque()
        self._scheduled = False
        self._due: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._thread = threading.get_ident()
        self.is_delivering = False
        self.after_delivery: Callable[[], None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this dispatcher's loop."""
        return asyncio._get_running_loop() is self.loop

    @property
    def is_at_hand(self) -> bool:
        """Whether the caller may touch the loop's objects: the loop runs, in the caller's thread."""
        # Needed for every result, where `is_current` would cost a system call: asyncio compares process ids each time,
        # which was a tenth of an inline step.
        return self._thread == threading.get_ident() and self.loop.is_running()

    def at_end_of_pass(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call an action once the loop has read all input of this pass; the caller is in the loop's thread.

        For calls to a thread that several sessions share. Handed over one by one, each would wake the thread, which
        then takes the interpreter from the loop: with 1000 sessions that is a quarter of a step's cost.
        """
        if not self._due:
            self.loop.call_soon(self._act)
        self._due.append((action, arguments))

    def _act(self) -> None:
        due, self._due = self._due, []
        for action, arguments in due:
            try:
                action(*arguments)
            except Exception:
                logger.exception("a call could not be handed over")

    def post(self, delivery: Delivery) -> None:
        """Deliver soon, on the loop; may be called from any thread. A closed loop drops its deliveries."""
        self._ready.append(delivery)
        if not self._scheduled:
            self._scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                self._ready.clear()

    def _drain(self) -> None:
        # The flag falls before the queue is emptied: a thread that appends after that schedules another pass.
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


def current_dispatcher() -> Dispatcher:
    """Return the dispatcher of the running loop."""
    loop = asyncio.get_running_loop()
    dispatcher = loop_local(loop, Dispatcher, lambda: Dispatcher(loop))
    dispatcher._thread = threading.get_ident()  # a loop may run again, in another thread
    return dispatcher
