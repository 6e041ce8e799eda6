"""Replies that clients have not read: how much waits for all clients of one event loop, and whom to disconnect for it.

One connection holds little by itself: a client that reads nothing is not read from either, and its sessions start no
further calls (`Backpressure`, `Session`). What is left are the replies that were under way, over many connections, for
ever. So a connection ends when its client has read nothing for a while, and the one with most unread bytes ends when
all of them together are too many. Knows buffers; must not know protocols.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

logger = logging.getLogger(__name__)

DEFAULT_MAX_UNREAD_BYTES: Final = 1024 * 1024 * 1024
STALL_S = 40.0
_LOOK_S: Final = 5.0
_PROGRESS_BYTES: Final = 4096  # a client that takes fewer in the time between two looks does not read


class Buffer(Protocol):
    """What was written and not sent: a transport, or a queue in front of one."""

    def get_write_buffer_size(self) -> int:
        """Return its bytes."""


Drop = Callable[[str], None]
"""Ends a connection at once; takes the reason."""


@dataclass(slots=True, eq=False)
class Reader:
    """A client that may be behind: how to disconnect it, and when it was last seen to read.

    One that is not kept is forgotten as soon as it has read everything.
    """

    drop: Drop
    unread: int
    read_at: float
    is_kept: bool


class UnreadReplies:
    """The connections of one loop whose clients are behind with reading.

        add ---- in all over `limit` ----> the largest is dropped
         |
         +-- look, every 5 s: nothing was read for 40 s ----> dropped
         +-- discard: the client has caught up, or is gone

    Args:
        loop: The loop of the connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._readers: dict[Buffer, Reader] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.limit = DEFAULT_MAX_UNREAD_BYTES

    def add(self, buffer: Buffer, drop: Drop) -> None:
        """Watch a connection that takes no more for now.

        Args:
            buffer: What waits for its client.
            drop: Ends it.
        """
        self._watch(buffer, drop)
        self.check()

    def _watch(self, buffer: Buffer, drop: Drop) -> Reader:
        reader = self._readers.get(buffer)
        if reader is None:
            unread = buffer.get_write_buffer_size()
            reader = self._readers[buffer] = Reader(drop, unread, self._loop.time(), is_kept=True)
            if self._timer is None:
                self._timer = self._loop.call_later(min(_LOOK_S, STALL_S / 4), self._look)
        return reader

    @contextmanager
    def during(self, buffer: Buffer, drop: Drop) -> Iterator[None]:
        """Watch a connection during a request, and afterwards until its response is read.

        For connections of servers that do not say when a client is behind.
        """
        reader = self._watch(buffer, drop)
        reader.is_kept = True
        try:
            yield
        finally:
            reader.is_kept = False
            if buffer.get_write_buffer_size() > _PROGRESS_BYTES:
                self.check()

    def discard(self, buffer: Buffer) -> None:
        """Watch a connection no more."""
        self._readers.pop(buffer, None)

    def check(self) -> None:
        """Drop connections until what is left fits; call it when more was written to one that is behind."""
        if len(self._readers) == 1 and next(iter(self._readers)).get_write_buffer_size() <= self.limit:
            return  # nearly always, without a list
        sizes = {buffer: buffer.get_write_buffer_size() for buffer in self._readers}
        total = sum(sizes.values())
        while total > self.limit:
            largest = max(sizes, key=sizes.__getitem__)
            total -= sizes.pop(largest)
            self._drop(largest, f"all clients together left more than {self.limit} bytes unread")

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for buffer, reader in list(self._readers.items()):
            unread = buffer.get_write_buffer_size()
            if not unread and not reader.is_kept:
                self.discard(buffer)
            elif not unread or reader.unread - unread >= min(_PROGRESS_BYTES, reader.unread):
                reader.read_at = now
            elif now - reader.read_at >= STALL_S:
                self._drop(buffer, f"nothing was read for {STALL_S:g} s")
            reader.unread = unread
        self.check()
        if self._readers:
            self._timer = self._loop.call_later(min(_LOOK_S, STALL_S / 4), self._look)

    def _drop(self, buffer: Buffer, reason: str) -> None:
        reader = self._readers.pop(buffer)
        logger.warning("a client that left %d bytes unread is disconnected: %s", buffer.get_write_buffer_size(), reason)
        try:
            reader.drop(reason)
        except Exception:  # one broken connection must not end the watch over the others
            logger.exception("a connection could not be dropped")
