"""Writes collected over one pass of the event loop and made together at its end.

Sending wakes the peer; a peer that wakes to many replies at once costs both sides far less than one that wakes for
each. Knows transports and bytes.
"""

from __future__ import annotations

import asyncio
import logging

from ..runners import current_dispatcher, loop_local

logger = logging.getLogger(__name__)

_MOST_BYTES = 1024 * 1024


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
        if self._size > _MOST_BYTES:  # a transport that has too much says so only once it has got it
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
