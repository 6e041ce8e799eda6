"""Writes collected over one pass of the event loop and made together at its end.

Sending wakes the peer; a peer that wakes to many replies at once costs both sides far less than one that wakes for
each. Knows transports and bytes.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar
from weakref import WeakKeyDictionary

from ..runners import current_hub


class WriteBatch:
    """The writes of one loop that are due at the end of this pass."""

    _by_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, WriteBatch]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._hub = current_hub()
        self._hub.after_delivery = self.flush
        self._due: list[tuple[asyncio.WriteTransport, bytes]] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> WriteBatch:
        """Return the loop's own batch."""
        batch = cls._by_loop.get(loop)
        if batch is None:
            batch = cls._by_loop[loop] = cls(loop)
        return batch

    def add(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write soon, in order."""
        if not self._due and not self._hub.is_delivering:
            self._loop.call_soon(self.flush)
        self._due.append((transport, data))

    def flush(self) -> None:
        """Write what is due."""
        due, self._due = self._due, []
        for transport, data in due:
            transport.write(data)
