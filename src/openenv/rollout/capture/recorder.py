"""Writes a rollout's calls into its journal, each message, tool and prompt token once.

Knows the entries and what they mean; `recording` reads them back. Must not know sockets.

    open    the rollout: id, metadata, model, budget
    call    a request: what the agent asked, what was sent, and the items that are new in it
    try     an attempt that failed before the first byte of an answer
    resent  what was sent after the endpoint had turned down a parameter
    head    status of the answer
    prompt  the prompt's token ids, as far as they differ from those of an earlier call
    up      events of a stream, as they came
    body    an answer that was no stream
    end     how the call ended
    stop    a call that was answered by the budget and not by the model
    note    what happened to the rollout: closed, revoked, failed
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from typing import Any

from openenv.rollout.capture.encoding import Json, dumps
from openenv.rollout.capture.journal import Journal, JournalFull

ITEM_LISTS = ("messages", "input", "tools", "system")
ITEM_TEXTS = ("instructions", "system", "input")
_TEXT_LIMIT = 200
_PROMPTS_KEPT = 4


class Recorder:
    """The write side of one rollout's records."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._numbers: dict[bytes, int] = {}
        self._prompts: deque[tuple[int, array[int]]] = deque(maxlen=_PROMPTS_KEPT)
        self._calls = 0
        self.failure: str | None = None
        """Why records are missing, once any are."""
        self._owed = False

    def opened(self, entry: Json) -> None:
        """Write the first entry."""
        with self._journal.opened():
            self._append({"k": "open", "v": 1, "at": time.time(), **entry})

    def begin(self, facts: Json, asked: Json, sent: Json) -> CallRecorder:
        """Write down a request, and return the recorder of its call.

        Raises:
            JournalFull: it could not be written.
        """
        self._journal.acquire()
        try:
            number = self._calls + 1
            new: list[Any] = []
            fresh: dict[bytes, int] = {}
            packed = self._pack(asked, new, fresh)
            changes = self._changes(asked, sent, new, fresh)
            head = {"k": "call", "n": number, "at": time.time(), **facts}
            self._append(head, dumps({"asked": packed, "sent": changes, "new": new}))
            self._numbers.update(fresh)
            self._calls = number
        except BaseException:
            self._journal.release()
            raise
        return CallRecorder(self, number)

    def forget(self) -> None:
        """Let go of what is needed only to write more calls."""
        self._numbers.clear()
        self._prompts.clear()

    def stopped(self, facts: Json) -> None:
        """Write down that the budget answered a call."""
        with self._journal.opened():
            self._append({"k": "stop", "at": time.time(), **facts})

    def note(self, what: str, **facts: Any) -> None:
        """Write down what happened to the rollout."""
        with self._journal.opened():
            self._append({"k": "note", "what": what, "at": time.time(), **facts})

    def _append(self, head: Json, payload: bytes = b"") -> None:
        try:
            if self._owed:
                self._journal.append({"k": "note", "what": "failed", "reason": self.failure, "at": time.time()})
                self._owed = False
            self._journal.append(head, payload)
        except JournalFull as exc:
            self.failure = self.failure or str(exc)
            self._owed = True
            raise

    def _changes(self, asked: Json, sent: Json, new: list[Any], fresh: dict[bytes, int]) -> Json:
        changed = {key: value for key, value in sent.items() if key not in asked or asked[key] is not value}
        changed = {key: value for key, value in changed.items() if key not in asked or asked[key] != value}
        return {"set": self._pack(changed, new, fresh), "unset": [key for key in asked if key not in sent]}

    def _pack(self, body: Json, new: list[Any], fresh: dict[bytes, int]) -> Json:
        """Return a body whose messages, tools and long texts are numbers of items."""
        packed: Json = {}
        for key, value in body.items():
            if key in ITEM_LISTS and isinstance(value, list):
                packed[key] = {"$items": _runs([self._number(item, new, fresh) for item in value])}
            elif key in ITEM_TEXTS and isinstance(value, str) and len(value) > _TEXT_LIMIT:
                packed[key] = {"$item": self._number(value, new, fresh)}
            elif key in (*ITEM_LISTS, *ITEM_TEXTS):
                packed[key] = {"$plain": value}
            else:
                packed[key] = value
        return packed

    def _number(self, item: Any, new: list[Any], fresh: dict[bytes, int]) -> int:
        digest = hashlib.blake2b(dumps(item), digest_size=16).digest()
        number = self._numbers.get(digest)
        if number is None:
            number = fresh.get(digest)
        if number is None:
            number = fresh[digest] = len(self._numbers) + len(fresh)
            new.append(item)
        return number

    def _prompt(self, number: int, ids: list[int], asked: bool) -> None:
        head: Json = {"k": "prompt", "n": number, **({"asked": True} if asked else {})}
        try:
            packed = array("I", ids)
        except (TypeError, OverflowError, ValueError):  # not ids; kept as they came
            self._append({**head, "base": 0, "keep": 0, "ids": ids})
            return
        base, keep = 0, 0
        for other, known in self._prompts:
            shared = _shared(known, packed)
            if shared > keep:
                base, keep = other, shared
        self._append({**head, "base": base, "keep": keep, "ids": ids[keep:]})
        self._prompts.append((number, packed))


class CallRecorder:
    """The write side of one call. Whatever it takes is on its way to disk when it returns."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self.number = number
        self._ended = False

    def tried(self, status: int | None, error: Json) -> None:
        """Write down an attempt that failed."""
        self._append({"k": "try", "status": status, "error": error, "at": time.time()})

    def resent(self, asked: Json, sent: Json) -> None:
        """Write down that something else is sent than at first."""
        new: list[Any] = []
        fresh: dict[bytes, int] = {}
        changes = self._recorder._changes(asked, sent, new, fresh)
        self._append({"k": "resent"}, dumps({"sent": changes, "new": new}))
        self._recorder._numbers.update(fresh)

    def head(self, status: int, **facts: Any) -> None:
        """Write down the status of the answer."""
        self._append({"k": "head", "status": status, "at": time.time(), **facts})

    def prompt(self, ids: list[int], *, asked: bool = False) -> None:
        """Write down the prompt's ids; `asked` where the engine named them apart from its answer."""
        self._recorder._prompt(self.number, ids, asked)

    def events(self, data: bytes) -> None:
        """Write down events of a stream."""
        self._append({"k": "up"}, data)

    def body(self, data: bytes) -> None:
        """Write down an answer that was no stream."""
        self._append({"k": "body"}, data)

    def end(self, how: str, **facts: Any) -> None:
        """Write down how the call ended; the first end counts."""
        if self._ended:
            return
        self._ended = True
        try:
            self._append({"k": "end", "how": how, "at": time.time(), **facts})
        finally:
            self._recorder._journal.release()

    def _append(self, head: Json, payload: bytes = b"") -> None:
        self._recorder._append({"k": head["k"], "n": self.number, **head}, payload)


def _runs(numbers: list[int]) -> list[list[int]]:
    """Shorten a list of numbers to pairs of a start and how many follow each other from there."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _shared(one: array[int], other: array[int]) -> int:
    """Return how many leading ids are the same, comparing blocks of memory rather than numbers."""
    low, high = 0, min(len(one), len(other))
    left, right = memoryview(one), memoryview(other)
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
