"""Waiting for a slot: a bounded line, first come, first served, in which everybody can learn his place.

Knows tickets and who is next; must not know sessions. May be used from several threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

_LOOK_S = 0.5


class Ticket:
    """A place in the line; `called` is done when the holder should try."""

    __slots__ = ("called", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.called: asyncio.Future[None] = self.loop.create_future()


class AdmissionQueue:
    """Those who wait for a slot.

    Args:
        limit: How many may wait.
        clock: Tells how old the known places are.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: OrderedDict[Ticket, bool] = OrderedDict()  # whether it was called
        self._aside: set[Ticket] = set()
        self._places: dict[Ticket, int] = {}
        self._placed_at = -_LOOK_S

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self) -> Ticket | None:
        """Take the last place; None if the line is full."""
        ticket = Ticket()
        with self._lock:
            if len(self._tickets) >= self.limit:
                return None
            self._tickets[ticket] = False
            self._places[ticket] = len(self._tickets)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Leave the line, with a slot or without; whoever is next now may try."""
        with self._lock:
            self._tickets.pop(ticket, None)
            self._places.pop(ticket, None)
            self._aside.discard(ticket)
        self.call_next()

    def slot_freed(self) -> None:
        """Say that a slot may be free, and that those who stood aside may try again."""
        with self._lock:
            self._aside.clear()
        self.call_next()

    def call_next(self) -> None:
        """Call whoever is next, unless that has been done. Each who gets a slot calls the next one by leaving."""
        with self._lock:
            ticket = self._first()
            if ticket is None or self._tickets[ticket]:
                return
            self._tickets[ticket] = True
        try:
            ticket.loop.call_soon_threadsafe(_wake, ticket.called)
        except RuntimeError:  # its loop has ended
            self.leave(ticket)

    def _first(self) -> Ticket | None:
        """The ticket that a free slot is for; the caller holds the lock."""
        if not self._aside:
            return next(iter(self._tickets), None)
        return next((ticket for ticket in self._tickets if ticket not in self._aside), None)

    def stand_aside(self, ticket: Ticket) -> None:
        """Keep the place, but let others pass until a slot is freed: a limit of its own holds this one back."""
        with self._lock:
            if ticket in self._tickets:
                self._aside.add(ticket)
        self.call_next()

    def wait_again(self, ticket: Ticket) -> None:
        """Be ready to be called once more; to be said before trying, or a call in between would be lost."""
        with self._lock:
            if ticket in self._tickets:
                self._tickets[ticket] = False
                ticket.called = ticket.loop.create_future()

    def is_next(self, ticket: Ticket) -> bool:
        """Whether a slot that is free now is for this ticket."""
        with self._lock:
            return self._first() is ticket

    def position(self, ticket: Ticket) -> int:
        """Return a place in the line, 1 for the next; as it was a moment ago, since counting is not free."""
        with self._lock:
            now = self._clock()
            if ticket not in self._places or now - self._placed_at > _LOOK_S:
                self._placed_at = now
                self._places = {waiting: place for place, waiting in enumerate(self._tickets, 1)}
            return self._places.get(ticket, 1)


def _wake(called: asyncio.Future[None]) -> None:
    if not called.done():
        called.set_result(None)
