"""Limits the memory that slow clients of one event loop use: unread replies and incomplete requests.

One connection uses little. The server stops reading from a client that does not read, its sessions start no further
calls (`Backpressure`, `Session`), and requests have a size limit. But many connections with unread replies or endless
requests add up. So a connection ends if its client makes no progress for a while, and the largest one ends if all of
them together exceed a limit. Knows buffers; must not know protocols.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

logger = logging.getLogger(__name__)

DEFAULT_MAX_UNREAD_BYTES: Final = 1024 * 1024 * 1024
STALL_S = 40.0
_LOOK_S: Final = 5.0
_PROGRESS_BYTES: Final = 4096  # a client that moves fewer bytes between two checks counts as stopped
_SMALL_REQUEST: Final = 65_536  # requests up to this size may take any time


class Buffer(Protocol):
    """Unsent bytes: of a transport, or of a queue in front of one."""

    def get_write_buffer_size(self) -> int:
        """Return its bytes."""


Drop = Callable[[str, bool], None]
"""Ends a connection; takes the reason, and whether its memory is needed now."""


@dataclass(slots=True, eq=False)
class Reader:
    """A client that may read too slowly: how to disconnect it, and when it last read.

    If `is_kept` is false, the watch forgets the client as soon as it has read everything.
    """

    drop: Drop
    unread: int
    read_at: float
    is_kept: bool


class UnreadReplies:
    """The connections of one loop with clients that read too slowly.

        add ---- all together over `limit` ----> the largest is dropped
         |
         +-- check, every 5 s: nothing was read for 40 s ----> dropped
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
        """Watch a connection with a full buffer.

        Args:
            buffer: Its unsent bytes.
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

    def begin_request(self, buffer: Buffer, drop: Drop) -> Reader:
        """Watch a connection during a request; for servers that do not report slow readers."""
        reader = self._watch(buffer, drop)
        reader.is_kept = True
        return reader

    def end_request(self, buffer: Buffer, reader: Reader) -> None:
        """Watch the connection until the response is read."""
        reader.is_kept = False
        if buffer.get_write_buffer_size() > _PROGRESS_BYTES:
            self.check()

    def discard(self, buffer: Buffer) -> None:
        """Stop watching a connection."""
        self._readers.pop(buffer, None)

    def check(self) -> None:
        """Drop connections until the rest fits the limit; call this after more bytes went to a slow client."""
        if len(self._readers) == 1 and next(iter(self._readers)).get_write_buffer_size() <= self.limit:
            return  # the common case, without a list
        sizes = {buffer: buffer.get_write_buffer_size() for buffer in self._readers}
        total = sum(sizes.values())
        while total > self.limit:
            largest = max(sizes, key=sizes.__getitem__)
            total -= sizes.pop(largest)
            # Its memory must be free before the next reply is written: a hundred connections could be dropped while
            # each of them still waits for its close frame.
            self._drop(largest, f"all clients together left more than {self.limit} bytes unread", is_urgent=True)

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
                self._drop(buffer, f"nothing was read for {STALL_S:g} s", is_urgent=False)
            reader.unread = unread
        self.check()
        if self._readers:
            self._timer = self._loop.call_later(min(_LOOK_S, STALL_S / 4), self._look)

    def _drop(self, buffer: Buffer, reason: str, *, is_urgent: bool) -> None:
        reader = self._readers.pop(buffer)
        logger.warning("a client that left %d bytes unread is disconnected: %s", buffer.get_write_buffer_size(), reason)
        try:
            reader.drop(reason, is_urgent)
        except Exception:  # one broken connection must not end the watch over the others
            logger.exception("a connection could not be dropped")


class RequestSource(Protocol):
    """The source of a request that arrives in pieces."""

    @property
    def can_be_heard(self) -> bool:
        """Whether the server reads from it now; if not, the client cannot be blamed for the delay."""

    def drop_request(self, reason: str) -> None:
        """Free the pieces, and end the connection."""


@dataclass(slots=True, eq=False)
class PartialRequest:
    """The buffered size of a request now and at the last check, and when it last grew."""

    size: int
    seen: int
    grew_at: float


class PartialRequests:
    """The incomplete requests of one loop.

        hold ---- all together over `limit` ----> the largest is dropped
          |
          +-- check, every 5 s: almost nothing arrived for 40 s ----> dropped, unless it is small
          +-- discard: the request is complete, or its client is gone

    Args:
        loop: The loop of the connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._requests: dict[RequestSource, PartialRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.size = 0
        """The buffered bytes of all incomplete requests."""
        self.limit = DEFAULT_MAX_UNREAD_BYTES

    def hold(self, source: RequestSource, size: int) -> None:
        """Record the buffered size of a request; this may drop it or another one."""
        request = self._requests.get(source)
        if request is None:
            request = self._requests[source] = PartialRequest(0, 0, self._loop.time())
            if self._timer is None:
                self._timer = self._loop.call_later(min(_LOOK_S, STALL_S / 4), self._look)
        self.size += size - request.size
        request.size = size
        while self.size > self.limit:
            largest = max(self._requests, key=lambda each: self._requests[each].size)
            self._drop(largest, f"all clients together sent more than {self.limit} bytes of unfinished requests")

    def discard(self, source: RequestSource) -> None:
        """Forget a request: it is complete, or its client is gone."""
        request = self._requests.pop(source, None)
        if request is not None:
            self.size -= request.size

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for source, request in list(self._requests.items()):
            has_grown = request.size - request.seen >= _PROGRESS_BYTES
            if has_grown or request.size <= _SMALL_REQUEST or not source.can_be_heard:
                request.grew_at = now
            elif now - request.grew_at >= STALL_S:
                self._drop(source, f"a request came no further for {STALL_S:g} s")
            request.seen = request.size
        if self._requests:
            self._timer = self._loop.call_later(min(_LOOK_S, STALL_S / 4), self._look)

    def _drop(self, source: RequestSource, reason: str) -> None:
        size = self._requests[source].size
        self.discard(source)
        logger.warning("a client that sent %d bytes of a request is disconnected: %s", size, reason)
        try:
            source.drop_request(reason)
        except Exception:  # one broken connection must not end the watch over the others
            logger.exception("a connection could not be dropped")
