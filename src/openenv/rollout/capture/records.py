"""A rollout's records on disk: the journal file, the recorder that writes calls, the reader of recordings."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from openenv.errors import CaptureError

from ..task import Dialect
from .dialects import DIALECTS
from .dialects.dialect import MALFORMED, Completion, DialectModule
from .encoding import STREAM_DONE, EventSplitter, Json, dumps, event_data, load_object, loads


class JournalFull(CaptureError):
    """An entry could not be written: the disk is full, or the file is gone."""


class Journal:
    """Appends entries to one file. The file is open only while calls are under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._users = 0
        self._size = 0

    def create(self) -> None:
        """Make the file.

        Raises:
            CaptureError: there is one already, or it cannot be made.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            raise CaptureError(f"There are records already in {self.path}.") from None
        except OSError as exc:
            raise CaptureError(f"Cannot make {self.path}: {exc}") from exc

    def acquire(self) -> None:
        """Open the file for one more user.

        Raises:
            JournalFull: it cannot be opened.
        """
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                self._size = os.fstat(self._fd).st_size
            except OSError as exc:
                raise JournalFull(f"Cannot open the records: {exc}") from exc
        self._users += 1

    def release(self) -> None:
        """Close the file with its last user."""
        self._users -= 1
        if self._users == 0 and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Journal]:
        """Have the file open for a while."""
        self.acquire()
        try:
            yield self
        finally:
            self.release()

    def append(self, head: Json, payload: bytes = b"") -> None:
        """Write one entry, all of it or nothing.

        Raises:
            JournalFull: it could not be written.
        """
        line = dumps({**head, "len": len(payload)}) + b"\n" + payload + b"\n" if payload else dumps(head) + b"\n"
        self.write(line)

    def write(self, data: bytes) -> None:
        """Write bytes that are one or more whole entries."""
        assert self._fd is not None, "the journal is not open"
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half entry, or nothing after it could be read
            raise JournalFull(f"Cannot write the records: {exc.strerror or exc}") from exc
        self._size += len(data)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry: its line, and its bytes."""

    head: Json
    payload: bytes


@dataclass(frozen=True, slots=True)
class JournalEntries:
    """All entries of a file; `torn` is how many bytes at its end are no whole entry."""

    entries: list[JournalEntry]
    torn: int


def read_entries(path: Path) -> JournalEntries:
    """Read a journal, also one whose writer was killed.

    Raises:
        CaptureError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise CaptureError(f"Cannot read {path}: {exc}") from exc
    entries: list[JournalEntry] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position)
        head = load_object(data[position:end]) if end >= 0 else None
        if head is None:
            break
        length = head.get("len")
        start = end + 1
        if isinstance(length, int):
            if start + length >= len(data) or data[start + length : start + length + 1] != b"\n":
                break
            entries.append(JournalEntry(head, data[start : start + length]))
            position = start + length + 1
        else:
            entries.append(JournalEntry(head, b""))
            position = start
    return JournalEntries(entries, len(data) - position)


# recorder: Writes a rollout's calls into its journal, each message, tool and prompt token once.
#
# Knows the entries and what they mean; `recording` reads them back. Must not know sockets.
#
#     open    the rollout: id, metadata, model, budget
#     call    a request: what the agent asked, what was sent, and the items that are new in it
#     try     an attempt that failed before the first byte of an answer
#     resent  what was sent after the endpoint had turned down a parameter
#     head    status of the answer
#     prompt  the prompt's token ids, as far as they differ from those of an earlier call
#     up      events of a stream, as they came
#     body    an answer that was no stream
#     end     how the call ended
#     stop    a call that was answered by the budget and not by the model
#     note    what happened to the rollout: closed, revoked, failed


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


# recording: Reads a rollout's records back: calls as they were, whole or as far as they got.
#
# Knows the entries that `recorder` writes. Must not know sockets.


FILE = "calls.log"
"""The name of the records in a rollout's folder."""


@dataclass(slots=True)
class Call:
    """One model call of a rollout."""

    number: int
    """From 1, in the order in which the calls came."""
    dialect: Dialect
    """How the agent spoke."""
    endpoint_dialect: Dialect
    """How the endpoint was spoken to; `sent` and `response` are in this one."""
    path: str
    streamed: bool
    request: Json
    """What the agent asked, in full."""
    sent: Json
    """What the endpoint was asked."""
    started_at: float
    response: Json | None = None
    """The endpoint's answer; of a stream, what it comes to, as far as it got."""
    status: int | None = None
    """The endpoint's HTTP status; None where it never answered."""
    error: Json | None = None
    ended: str | None = None
    """`complete`, `failed` (the endpoint answered with an error), `unreachable`, `timeout`, `broken` (the answer did
    not come whole), `agent_gone`, `revoked`, `record_failed`; None where the proxy was killed in the middle."""
    attempts: int = 1
    latency_s: float = 0.0
    first_byte_s: float | None = None
    policy_version: str | None = None
    prompt_ids_asked: bool = False
    """Whether the engine named the prompt's ids apart from its answer, when it was asked for them."""
    completion: Completion = field(default_factory=Completion)

    @property
    def sampled(self) -> bool:
        """Say whether a model said anything in this call."""
        return (self.response is not None and self.error is None) or len(self.completion.sampled) > 0

    @property
    def module(self) -> DialectModule:
        """Return the dialect module that reads `sent` and `response`."""
        return DIALECTS[self.endpoint_dialect]


@dataclass(slots=True)
class Recording:
    """All that is on disk of one rollout."""

    rollout_id: str
    path: Path
    opened_at: float = 0.0
    metadata: Json = field(default_factory=dict)
    model: Json = field(default_factory=dict)
    budget: Json = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    stops: list[Json] = field(default_factory=list)
    """Calls that the budget answered."""
    notes: list[Json] = field(default_factory=list)
    torn_bytes: int = 0
    """How many bytes at the end were no whole entry: the writer was killed while it wrote."""


def read(path: Path | str) -> Recording:
    """Read the records of a rollout: its folder, or the file in it.

    Raises:
        CaptureError: there are none, or they are not such records.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    found = read_entries(file)
    if not found.entries or found.entries[0].head.get("k") != "open":
        raise CaptureError(f"{file} does not hold records of a rollout.")
    opening = found.entries[0].head
    recording = Recording(
        rollout_id=str(opening.get("rollout_id", "")),
        path=file,
        opened_at=opening.get("at", 0.0),
        metadata=opening.get("metadata") or {},
        model=opening.get("model") or {},
        budget=opening.get("budget") or {},
        torn_bytes=found.torn,
    )
    items: list[Any] = []
    prompts: dict[int, list[int]] = {}
    drafts: dict[int, _Draft] = {}
    for entry in found.entries[1:]:
        kind, number = entry.head.get("k"), entry.head.get("n")
        if kind == "call":
            drafts[entry.head["n"]] = _Draft(_call(entry, items))
        elif kind == "stop":
            recording.stops.append(entry.head)
        elif kind == "note":
            recording.notes.append(entry.head)
        elif kind == "prompt":
            ids = prompts.get(entry.head["base"], [])[: entry.head["keep"]] + entry.head["ids"]
            prompts[entry.head["n"]] = drafts[entry.head["n"]].prompt_ids = ids
            drafts[entry.head["n"]].begun.prompt_ids_asked = bool(entry.head.get("asked"))
        elif number in drafts and kind == "resent":
            _resend(drafts[number].begun, loads(entry.payload), items)
        elif number in drafts:
            drafts[number].feed(entry)
    recording.calls = [draft.call() for draft in drafts.values()]
    return recording


def _call(entry: JournalEntry, items: list[Any]) -> Call:
    head, body = entry.head, loads(entry.payload)
    items.extend(body["new"])
    asked = _unpack(body["asked"], items)
    call = Call(
        number=head["n"],
        dialect=cast("Dialect", head["dialect"]),
        endpoint_dialect=cast("Dialect", head["to"]),
        path=head.get("path", ""),
        streamed=bool(head.get("stream")),
        request=asked,
        sent=asked,
        started_at=head["at"],
    )
    _resend(call, {**body, "new": []}, items)
    return call


def _resend(call: Call, body: Json, items: list[Any]) -> None:
    """Take note of what was really sent: the request, with some things set and others left out."""
    items.extend(body["new"])
    unset = set(body["sent"]["unset"])
    call.sent = {key: value for key, value in call.request.items() if key not in unset}
    call.sent.update(_unpack(body["sent"]["set"], items))


def _unpack(packed: Json, items: list[Any]) -> Json:
    body: Json = {}
    for key, value in packed.items():
        if isinstance(value, dict) and len(value) == 1:
            if "$items" in value:
                value = [items[start + index] for start, count in value["$items"] for index in range(count)]
            elif "$item" in value:
                value = items[value["$item"]]
            elif "$plain" in value:
                value = value["$plain"]
        body[key] = value
    return body


class _Draft:
    """A call whose entries are being read."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._events: list[bytes] = []
        self._body: bytes | None = None
        self._last_at = call.started_at
        self.prompt_ids: list[int] | None = None

    @property
    def begun(self) -> Call:
        """Return the call as it began."""
        return self._call

    def feed(self, entry: JournalEntry) -> None:
        head, call = entry.head, self._call
        kind = head["k"]
        self._last_at = head.get("at", self._last_at)
        if kind == "try":
            call.attempts += 1
            call.status, call.error = head.get("status"), head.get("error")
        elif kind == "head":
            call.status, call.error = head["status"], None
            call.first_byte_s = head["at"] - call.started_at
            call.policy_version = head.get("policy")
        elif kind == "up":
            self._events.append(entry.payload)
        elif kind == "body":
            self._body = entry.payload
        elif kind == "end":
            call.ended = head["how"]
            call.error = head.get("error") or call.error
            if call.error is not None and call.error.get("status") is not None:
                call.status = call.error["status"]
            call.policy_version = head.get("policy") or call.policy_version
            call.attempts = head.get("attempts", call.attempts)

    def call(self) -> Call:
        call = self._call
        call.latency_s = max(0.0, self._last_at - call.started_at)
        response = load_object(self._body) if self._body is not None else self._assembled()
        if response is None:
            return call
        if self.prompt_ids is not None:
            response["prompt_token_ids"] = self.prompt_ids
        call.response = response
        if call.status is not None and call.status >= 400:
            return call
        try:
            call.completion = call.module.completion(response)
        except MALFORMED as exc:
            call.error = call.error or {"message": f"the answer cannot be read: {exc}"}
        call.error = call.error or call.completion.error
        call.policy_version = call.policy_version or call.completion.policy_version
        return call

    def _assembled(self) -> Json | None:
        if not self._events:
            return None
        assembler = self._call.module.assembler()
        splitter = EventSplitter()
        for event in splitter.feed(b"".join(self._events)):
            data = event_data(event)
            chunk = load_object(data) if data is not None and data != STREAM_DONE else None
            if chunk is not None:
                with contextlib.suppress(*MALFORMED):  # what else the engine said can still be read
                    assembler.feed(chunk)
        return assembler.response()
