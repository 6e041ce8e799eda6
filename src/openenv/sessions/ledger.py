"""`Ledger`: the replies to a session's last requests, so that a repeated request is answered and never run twice.

Keys are the ids of requests. Where they are numbers they only grow, so an old one whose reply is gone is told from a
new one. Knows keys and replies; must not know what they mean. Used on one event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import StaleRequest

KEPT = 16
KEPT_BYTES = 256 * 1024

Listener = Callable[[Any], None]


class Entry:
    """One request: its reply, or those who wait for it.

    Args:
        asked: What was asked, as far as whoever asks can tell it from another request.
    """

    __slots__ = ("_listeners", "asked", "is_done", "reply", "size")

    def __init__(self, asked: bytes | str | None = None) -> None:
        self.asked = asked
        self.is_done = False
        self.reply: Any = None
        self.size = 0
        self._listeners: list[Listener] | None = None

    def tell(self, listener: Listener) -> None:
        """Give the reply to somebody, now or when it is there."""
        if self.is_done:
            listener(self.reply)
        elif self._listeners is None:
            self._listeners = [listener]
        else:
            self._listeners.append(listener)

    def finish(self, reply: Any, size: int) -> None:
        """Keep the reply and tell those who wait."""
        self.is_done, self.reply, self.size = True, reply, size
        listeners, self._listeners = self._listeners, None
        for listener in listeners or ():
            listener(reply)


class Ledger:
    """The requests of one session. The last reply is always kept, earlier ones while they are few and small."""

    __slots__ = ("_entries", "_total", "hits", "last_id")

    def __init__(self) -> None:
        self._entries: dict[int | str, Entry] = {}
        self._total = 0
        self.last_id = 0
        self.hits = 0

    def find(self, key: int | str) -> Entry | None:
        """Return a request that was seen before, or None for a new one.

        Raises:
            StaleRequest: It was seen before, but its reply is no longer kept.
        """
        entry = self._entries.get(key)
        if entry is not None:
            self.hits += 1
        elif isinstance(key, int) and key <= self.last_id:
            raise StaleRequest(key, self.last_id)
        return entry

    def begin(self, key: int | str, asked: bytes | str | None = None) -> Entry:
        """Note a new request."""
        entry = self._entries[key] = Entry(asked)
        if isinstance(key, int):
            self.last_id = key
        return entry

    def finish(self, entry: Entry, reply: Any, size: int) -> None:
        """Note a reply, and let go of earlier ones that are too many."""
        entry.finish(reply, size)
        self._total += size
        while len(self._entries) > KEPT or (self._total > KEPT_BYTES and len(self._entries) > 1):
            key, oldest = next(iter(self._entries.items()))
            if not oldest.is_done:
                self._drop_behind()
                return
            del self._entries[key]
            self._total -= oldest.size

    def _drop_behind(self) -> None:
        """Let go of what is too much where the oldest request still runs; the newest one is always kept."""
        total = 0
        for count, (key, kept) in enumerate(reversed(self._entries.copy().items())):
            total += kept.size
            if count and kept.is_done and (count >= KEPT or total > KEPT_BYTES):
                del self._entries[key]
                self._total -= kept.size
