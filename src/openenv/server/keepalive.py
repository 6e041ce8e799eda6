"""Pings for idle connections, one timer for all: a peer that vanished without a word is found and dropped.

Knows when a connection was last heard of; must not know what it carries.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

INTERVAL_S = 20.0
TIMEOUT_S = 20.0
_LOOK_S = 5.0


class Pingable(Protocol):
    """A connection that can be asked for a sign of life."""

    last_heard: float

    def ping(self) -> None:
        """Ask."""
        ...

    def abort(self) -> None:
        """Drop the connection."""
        ...


class KeepAlive:
    """Watches the connections of one loop."""

    _by_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, KeepAlive]] = WeakKeyDictionary()

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
        watcher = cls._by_loop.get(loop)
        if watcher is None:
            watcher = cls._by_loop[loop] = cls(loop)
        return watcher

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
            if pinged_at is not None and connection.last_heard < pinged_at:
                if now - pinged_at >= self._timeout_s:
                    connection.abort()
            elif now - connection.last_heard >= self._interval_s:
                self._pinged[connection] = now
                connection.ping()
            elif pinged_at is not None:
                self._pinged[connection] = None
        self._timer = self._loop.call_later(self._look_s, self._look) if self._pinged else None
