"""Pings for idle connections, one timer for all: a peer that vanished without a word is found and dropped.

Knows when a connection was last heard of; must not know what it carries.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from ...runners import current_dispatcher, loop_local

logger = logging.getLogger(__name__)

INTERVAL_S = 20.0
TIMEOUT_S = 20.0
_LOOK_S = 5.0


class Pingable(Protocol):
    """A connection that can be asked for a sign of life."""

    last_heard: float

    def can_be_heard(self, now: float) -> bool:
        """Say whether an answer could reach us now; a connection that is not being read cannot give one."""
        ...

    def ping(self) -> None:
        """Ask."""
        ...

    def abort(self) -> None:
        """Drop the connection."""
        ...


class KeepAlive:
    """Watches the connections of one loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, interval_s: float = INTERVAL_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._look_s = min(_LOOK_S, interval_s / 4)
        self._pinged: dict[Pingable, float | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> KeepAlive:
        """Return the loop's own watcher."""
        return loop_local(loop, cls, lambda: cls(loop))

    @property
    def watched(self) -> int:
        """How many connections the loop has."""
        return len(self._pinged)

    def add(self, connection: Pingable) -> None:
        """Watch a connection."""
        self._pinged[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._look_s, self._look)

    def discard(self, connection: Pingable) -> None:
        """Watch it no more."""
        self._pinged.pop(connection, None)
        if not self._pinged and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now = self._loop.time()
        for connection, pinged_at in list(self._pinged.items()):
            try:
                self._pinged[connection] = self._judge(connection, pinged_at, now)
            except Exception:  # one broken connection must not end the watch over the others
                logger.exception("a connection could not be checked and is dropped")
                self._pinged.pop(connection, None)
                connection.abort()
        self._timer = self._loop.call_later(self._look_s, self._look) if self._pinged else None

    def _judge(self, connection: Pingable, pinged_at: float | None, now: float) -> float | None:
        """Ask or drop where it is time; return when the connection was asked, if its answer is still due."""
        if not connection.can_be_heard(now):
            return None
        if pinged_at is not None and connection.last_heard < pinged_at:
            if now - pinged_at >= self._timeout_s:
                connection.abort()
            return pinged_at
        if now - connection.last_heard >= self._interval_s:
            connection.ping()
            return now
        return None


# writes: Writes collected over one pass of the event loop and made together at its end.
#
# Sending wakes the peer; a peer that wakes to many replies at once costs both sides far less than one that wakes for
# each. Knows transports and bytes.


_MOST_UNWRITTEN = 1024 * 1024


class WriteBatch:
    """The writes of one loop that are due at the end of this pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._hub = current_dispatcher()
        self._hub.after_delivery = self.flush
        self._due: list[tuple[asyncio.WriteTransport, bytes]] = []
        self._size = 0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> WriteBatch:
        """Return the loop's own batch."""
        return loop_local(loop, cls, lambda: cls(loop))

    def add(self, transport: asyncio.WriteTransport, data: bytes, *, is_alone: bool = False) -> None:
        """Write soon, in order; at once for a connection that has none beside it to wait for."""
        if is_alone and not self._due:
            transport.write(data)
            return
        if not self._due and not self._hub.is_delivering:
            self._loop.call_soon(self.flush)
        self._due.append((transport, data))
        self._size += len(data)
        if self._size > _MOST_UNWRITTEN:  # a transport that has too much says so only once it has got it
            self.flush()

    def flush(self) -> None:
        """Write what is due."""
        due, self._due = self._due, []
        self._size = 0
        for transport, data in due:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception:  # one connection that has just died must not cost the others their replies
                logger.debug("a reply could not be written", exc_info=True)
