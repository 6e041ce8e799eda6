"""`Ledger`: the replies to a session's last requests, to answer repeated requests without running them twice.

Keys are request ids: growing numbers on WebSockets, text (`Idempotency-Key`) over HTTP.

    find(7), last id is 5      new: run it
    find(5), running           its entry: the repeat waits for the same reply
    find(5), reply kept        its entry: the kept reply is sent again
    find(3), reply dropped     StaleRequest. Numbers only grow, so 3 must have run
    find("k"), reply dropped   StaleRequest, while "k" is among the last `REMEMBERED` text keys; after that it is new

Must not know what requests and replies mean. Used on one event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from openenv.errors import StaleRequest

KEPT: Final = 16
KEPT_BYTES: Final = 256 * 1024
REMEMBERED: Final = 1024

ReplyListener = Callable[[Any], None]


class LedgerEntry:
    """One request: its reply, or the listeners that wait for it.

    Args:
        key: Its id.
        request: Its content, to distinguish it from another request with the same id.
    """

    __slots__ = ("_listeners", "is_done", "key", "reply", "request")

    def __init__(self, key: int | str, request: Any = None) -> None:
        self.key = key
        self.request = request
        self.is_done = False
        self.reply: Any = None
        self._listeners: list[ReplyListener] | None = None

    def on_reply(self, listener: ReplyListener) -> None:
        """Call a listener with the reply, now or when it is ready."""
        if self.is_done:
            listener(self.reply)
        elif self._listeners is None:
            self._listeners = [listener]
        else:
            self._listeners.append(listener)

    def finish(self, reply: Any) -> None:
        """Set the reply and call the listeners."""
        self.is_done, self.reply = True, reply
        listeners, self._listeners = self._listeners, None
        for listener in listeners or ():
            listener(reply)


class Ledger:
    """The requests of one session. It always stores the last reply, and earlier ones while they are few and small.

    A grouped step gets an entry only when it is repeated: creating entries would cost more than all other work of the
    ledger for a step.
    """

    __slots__ = ("_dropped", "_kept", "_step", "_total", "_under_way", "hits", "last_id")

    def __init__(self) -> None:
        self._under_way: dict[int | str, LedgerEntry] = {}
        # Key, `request`, reply, size; in order of replies. Plain tuples: every step makes one.
        self._kept: list[tuple[int | str, Any, Any, int]] = []
        self._step: tuple[int, Any] | None = None  # key and `request` of the last step in a group
        self._dropped: dict[int, None] | None = None  # hashes of text keys, oldest first
        self._total = 0
        self.last_id = 0
        self.hits = 0

    def find(self, key: int | str) -> LedgerEntry | None:
        """Return the entry of a repeated request, or None for a new one.

        Raises:
            StaleRequest: The request was answered before, but the reply is no longer stored.
        """
        if type(key) is int and key > self.last_id:
            return None
        entry = self._under_way.get(key) or self._entry_of_step(key) or self._entry_of_kept(key)
        if entry is not None:
            self.hits += 1
        elif isinstance(key, int) or (self._dropped is not None and hash(key) in self._dropped):
            raise StaleRequest(key, self.last_id)
        return entry

    def _entry_of_step(self, key: int | str) -> LedgerEntry | None:
        if self._step is None or self._step[0] != key:
            return None
        entry = self._under_way[key] = LedgerEntry(*self._step)
        return entry

    def _entry_of_kept(self, key: int | str) -> LedgerEntry | None:
        for kept_key, request, reply, _ in self._kept:
            if kept_key == key:
                entry = LedgerEntry(key, request)
                entry.finish(reply)
                return entry
        return None

    def begin(self, key: int | str, request: Any = None) -> LedgerEntry:
        """Record a new request."""
        entry = LedgerEntry(key, request)
        self.add(entry)
        return entry

    def add(self, entry: LedgerEntry) -> None:
        """Record a new request with an entry made by the caller."""
        self._under_way[entry.key] = entry
        if isinstance(entry.key, int):
            self.last_id = entry.key

    def begin_step(self, key: int, request: Any) -> None:
        """Record a new step of a group."""
        # The previous step has run, because a session runs one at a time, but its group may not have delivered it yet.
        # Give it an entry now, or a repetition would find neither a step nor a reply.
        if self._step is not None and self._step[0] not in self._under_way:
            self._entry_of_step(self._step[0])
        self.last_id = key
        self._step = (key, request)

    def finish(self, entry: LedgerEntry, reply: Any, size: int) -> None:
        """Store a reply, and drop the oldest ones over the limits."""
        self._under_way.pop(entry.key, None)
        self._keep(entry.key, entry.request, reply, size)
        entry.finish(reply)

    def finish_step(self, key: int, request: Any, reply: Any, size: int) -> None:
        """Store the reply to a grouped step, and answer its repetitions."""
        if self._step is not None and self._step[0] == key:
            self._step = None
        self._keep(key, request, reply, size)
        if self._under_way and key in self._under_way:
            self._under_way.pop(key).finish(reply)

    def _keep(self, key: int | str, request: Any, reply: Any, size: int) -> None:
        kept = self._kept
        kept.append((key, request, reply, size))
        self._total += size
        while len(kept) > KEPT or (self._total > KEPT_BYTES and len(kept) > 1):
            # Keep the reply to the last id even if it is the oldest one: a slower, earlier request may end after it.
            is_last = kept[0][0] == self.last_id
            if is_last and len(kept) == 2 and type(key) is str:  # the last reply of either kind of keys is kept
                break
            oldest, _, _, freed = kept.pop(is_last)
            self._total -= freed
            if type(oldest) is str:
                self._remember(oldest)

    def _remember(self, key: str) -> None:
        """Remember the text key of a dropped reply: a copy of its request may still be on its way."""
        if self._dropped is None:
            self._dropped = {}
        self._dropped[hash(key)] = None
        if len(self._dropped) > REMEMBERED:
            del self._dropped[next(iter(self._dropped))]
