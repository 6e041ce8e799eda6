"""`Ledger`: the replies to a session's last requests, so that a repeated request is answered and never run twice.

Keys are the ids of requests. Where they are numbers they only grow, so an old one whose reply is gone is told from a
new one; of other keys, many more are remembered than replies are kept. Knows keys and replies; must not know what they
mean. Used on one event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import StaleRequest

KEPT = 16
KEPT_BYTES = 256 * 1024
REMEMBERED = 1024

ReplyListener = Callable[[Any], None]


class LedgerEntry:
    """One request: its reply, or those who wait for it.

    Args:
        key: Its id.
        asked: What was asked, as far as whoever asks can tell it from another request.
    """

    __slots__ = ("_listeners", "asked", "is_done", "key", "reply")

    def __init__(self, key: int | str, asked: Any = None) -> None:
        self.key = key
        self.asked = asked
        self.is_done = False
        self.reply: Any = None
        self._listeners: list[ReplyListener] | None = None

    def tell(self, listener: ReplyListener) -> None:
        """Give the reply to somebody, now or when it is there."""
        if self.is_done:
            listener(self.reply)
        elif self._listeners is None:
            self._listeners = [listener]
        else:
            self._listeners.append(listener)

    def finish(self, reply: Any) -> None:
        """Keep the reply and tell those who wait."""
        self.is_done, self.reply = True, reply
        listeners, self._listeners = self._listeners, None
        for listener in listeners or ():
            listener(reply)


_Entry = TypeVar("_Entry", bound=LedgerEntry)


class Ledger:
    """The requests of one session. The last reply is always kept, earlier ones while they are few and small.

    A step of a group has no entry of its own while nobody asks for it a second time: making one for each would cost
    more than everything else that is noted here.
    """

    __slots__ = ("_kept", "_past", "_step", "_total", "_under_way", "hits", "last_id")

    def __init__(self) -> None:
        self._under_way: dict[int | str, LedgerEntry] = {}
        self._kept: list[tuple[int | str, Any, Any, int]] = []  # key, what was asked, reply, size; in order of replies
        self._step: tuple[int, Any] | None = None  # key and what was asked of the last step in a group
        self._past: dict[int, None] | None = None
        self._total = 0
        self.last_id = 0
        self.hits = 0

    def find(self, key: int | str) -> LedgerEntry | None:
        """Return a request that was seen before, or None for a new one.

        Raises:
            StaleRequest: It was seen before, but its reply is no longer kept.
        """
        if type(key) is int and key > self.last_id:
            return None
        entry = self._under_way.get(key) or self._stepping(key) or self._answered(key)
        if entry is not None:
            self.hits += 1
        elif isinstance(key, int) or (self._past is not None and hash(key) in self._past):
            raise StaleRequest(key, self.last_id)
        return entry

    def _stepping(self, key: int | str) -> LedgerEntry | None:
        if self._step is None or self._step[0] != key:
            return None
        entry = self._under_way[key] = LedgerEntry(*self._step)
        return entry

    def _answered(self, key: int | str) -> LedgerEntry | None:
        for kept, asked, reply, _ in self._kept:
            if kept == key:
                entry = LedgerEntry(key, asked)
                entry.finish(reply)
                return entry
        return None

    def begin(self, key: int | str, asked: Any = None) -> LedgerEntry:
        """Note a new request."""
        return self.add(LedgerEntry(key, asked))

    def add(self, entry: _Entry) -> _Entry:
        """Note a new request under an entry of the caller's own class."""
        self._under_way[entry.key] = entry
        if isinstance(entry.key, int):
            self.last_id = entry.key
        return entry

    def begin_step(self, key: int, asked: Any) -> None:
        """Note a new step of a group."""
        if self._step is not None and self._step[0] not in self._under_way:  # has run, but nobody has been told yet
            self._stepping(self._step[0])
        self.last_id = key
        self._step = (key, asked)

    def finish(self, entry: LedgerEntry, reply: Any, size: int) -> None:
        """Note a reply, and let go of earlier ones that are too many."""
        self._under_way.pop(entry.key, None)
        self._keep(entry.key, entry.asked, reply, size)
        entry.finish(reply)

    def finish_step(self, key: int, asked: Any, reply: Any, size: int) -> None:
        """Note the reply to a step of a group, and tell those who have asked for it since."""
        if self._step is not None and self._step[0] == key:
            self._step = None
        self._keep(key, asked, reply, size)
        if self._under_way and key in self._under_way:
            self._under_way.pop(key).finish(reply)

    def _keep(self, key: int | str, asked: Any, reply: Any, size: int) -> None:
        kept = self._kept
        kept.append((key, asked, reply, size))
        self._total += size
        while len(kept) > KEPT or (self._total > KEPT_BYTES and len(kept) > 1):
            is_last = kept[0][0] == self.last_id  # it may have overtaken one before it
            if is_last and len(kept) == 2 and type(key) is str:  # the last of either kind of keys is kept
                break
            oldest, _, _, freed = kept.pop(is_last)
            self._total -= freed
            if type(oldest) is str:
                self._remember(oldest)

    def _remember(self, key: str) -> None:
        """Remember a key whose reply is let go of: a copy of its request may still be on its way."""
        if self._past is None:
            self._past = {}
        self._past[hash(key)] = None
        if len(self._past) > REMEMBERED:
            del self._past[next(iter(self._past))]
