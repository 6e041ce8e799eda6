"""The journal of a rollout on disk, `calls.log`: `Recorder` writes it, `read` returns its calls as a `Recording`.

An entry is a line of JSON. If the line has `len`, that number of bytes and a line break follow. `k` is the kind of the
entry, `n` the number of its call. Each message, tool and long text is in the file once: the items of all `new` lists
are numbered from 0 over the whole file, and requests refer to them by runs, [first, count].

Every entry begins with its checksum `c`, the CRC-32 of its bytes after it; the other lines below leave it out. An entry
that fails its checksum is torn if it is the last one, and is dropped when the rollout goes on. With whole entries after
it, the file is damaged, and nothing of it is used.

    {"c":"5d41402a","k":"open","v":1,"at":1794805356.7,"rollout_id":"r1","begun":{"agent":"opencode",...},"len":310}
    {"instruction":"Sort it.","verify":["true"],...}        the task; only rollouts of a store have it, and `begun`
    {"k":"model","at":1794805357.0,"metadata":{},"model":{...},"budget":{...}}       part of `open` without a store
    {"k":"call","n":1,"at":1794805357.6,"dialect":"anthropic","to":"openai_chat","path":"/v1/messages","stream":true,
     "not_trainable":[],"removed":["temperature"],"len":249}
    {"asked":{"stream":true,"messages":{"$items":[[0,1]]}},"sent":{"set":{"logprobs":true,...},"unset":[]},"new":[{"role":...}]}
    {"k":"try","n":1,"status":503,"error":{...}}             an attempt that failed before the first byte of an answer
    {"k":"resent","n":1,"len":93}                            the request without a refused parameter
    {"k":"head","n":1,"status":200,"at":1794805357.7}        the answer begins; `reused_ids` after a token-in request
    {"k":"prompt","n":2,"base":1,"keep":2,"ids":[44,35]}     the prompt: the first 2 IDs of call 1, then these
    {"k":"up","n":1,"len":1087}                              events of a stream, unchanged
    {"k":"body","n":1,"len":812}                             or an answer without streaming
    {"k":"end","n":1,"how":"complete","at":1794805357.7,"attempts":2,"tokens":2,"seconds":1.9}
    {"k":"event","phase":"setup","message":"setup 1 of 1: exit code 0","facts":{...},"at":1794805356.9}
    {"k":"stop","at":1794805358.1,"limit":"calls"}           a call that the budget answered
    {"k":"note","what":"revoked","at":1794805359.0}          or "failed": entries are missing here
    {"k":"resume","at":1794809000.2,"model":{...},...}       the rollout starts again; only what follows counts
    {"k":"replay","n":1,"at":1794809001.0}                   the agent got the recorded answer of call 1 again
    {"k":"files","call":2,"commands":1,"len":81}             changed files, and `command`: `run/recorded_files.py`

A branch has `"parent":{"rollout_id":"r1","call":5,"items":12}` in its `model` entry: it continues the parent's first 5
calls, and its references to items and prompts go on from the parent's. So the shared part is on disk once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import time
import zlib
from array import array
from collections import abc, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from openenv.errors import CaptureError
from openenv.sandboxes.host import sync_path

from ..progress import Progress
from ..tasks.model_parameters import (
    AgentDialectName,
    Dialect,
    sampling_constraints,
    steering,
    unasked_sampling,
    unknown_sampling,
)
from .dialects import DIALECTS
from .dialects.dialect import LOGPROBS, MALFORMED, TOKEN_IDS, Completion, ModelDialect, is_text_message
from .encoding import STREAM_DONE, EventSplitter, Json, dumps, event_data, load_object, loads

FILE = "calls.log"
"""The file name of the records, in the rollout's folder."""
MAX_RECORDS = 1024 * 1024 * 1024
"""The limit in bytes of a rollout's records, on disk plus the reader's memory. Above it, no call begins.

An agent must not be able to fill the disk or the reader's memory, neither by requests nor by the IDs of long prompts.
"""
# Small calls and items take more memory than disk: they become objects in the reader, and digests in the writer.
_CALL_COST = 10_000
_ITEM_COST = 500
_REFERENCE_COST = 8
# An agent sends its whole conversation with every call: call n repeats the messages of call n-1 and adds one or two.
# Unchanged requests would make the file grow with the square of the calls. So these fields are written as items, and
# each item is written once:
#
#     request of call 1    {"messages": [A, B]}          new: [A, B]     "messages": {"$items": [[0, 2]]}
#     request of call 2    {"messages": [A, B, C, D]}    new: [C, D]     "messages": {"$items": [[0, 4]]}
ITEM_LISTS = ("messages", "input", "contents", "tools", "system")
ITEM_TEXTS = ("instructions", "system", "input")
ITEM_FIELDS = frozenset((*ITEM_LISTS, *ITEM_TEXTS))
CONVERSATION = frozenset({"messages", "input", "contents"})
"""The fields that grow with each call."""
_TEXT_LIMIT = 200  # a shorter text is hardly longer than a reference to it
_TOKEN_DATA = frozenset((LOGPROBS, TOKEN_IDS))
# More than one, because agents switch between conversations: sub-agents, or a call for a title in between.
_RECENT_PROMPTS = 4


SYNC_S = 1.0
"""The pause between two `sync` of a rollout: a power cut loses no older answer."""
SHARED = "sampled in the parent rollout"
"""The reason why a branch does not train on the calls that it shares with its parent."""


class JournalFull(CaptureError):
    """An entry could not be written: the disk is full, or the file is gone."""


class RecordsTooLarge(CaptureError):
    """A request would exceed the limit of a rollout's records; no part of it was written."""


class Recorder:
    """Appends entries to a rollout's file, from any thread. The file is open only during calls.

    When a method returns, the kernel has the entry: it survives a killed process. After `sync` it survives a power cut.

    Args:
        path: The file.
        is_durable: Whether the entries must survive a power cut; pass False for a file that no other process needs.
    """

    def __init__(self, path: Path, *, is_durable: bool = False) -> None:
        self._path, self.is_durable = path, is_durable
        self.folder = path.parent
        self._is_new = False
        self._synced_at = -SYNC_S
        self.is_sync_planned = False
        """Whether a call has arranged a `sync` that will include the entries of others."""
        # Open only during calls: a proxy may serve more rollouts than it may open files.
        self._fd: int | None = None
        self._users = 0
        self._size = 0  # up to the last whole entry
        self._overhead = 0  # an estimate of the reader's memory, beyond the bytes of the file
        self._numbers: dict[bytes, int] = {}  # of items in the file, by their digests
        self._latest: dict[str, list[list[int]]] = {}  # by field, the runs of the last call's items
        self._prompts: deque[tuple[int, array[int]]] = deque(maxlen=_RECENT_PROMPTS)
        self._calls = 0
        self._taken: set[int] = set()  # numbers of calls in the file, and of the parent's calls
        self._lock = threading.RLock()  # the proxy's loop and the rollout's threads write
        self.failure: str | None = None
        """The reason for missing records; None if all are written."""
        self._owes_note = False  # whether a failed entry has no note in the file yet
        self.held: RecordingBuilder | None = None
        """Also gets each written entry, so that nobody has to read the file; None without `hold`."""

    def hold(self) -> RecordingBuilder:
        """Hold the entries in memory as well; call it before `create` or `reopen`."""
        self.held = RecordingBuilder(self._path, keeps_token_data=False)
        return self.held

    def create(self, about: Json, task: bytes = b"") -> None:
        """Create the file with its first entry; if `RolloutStore.begin` has created it, add the facts about the calls.

        With a task, the disk has the entry when this returns.

        Raises:
            CaptureError: There are records of calls already, or the file cannot be created.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # O_EXCL: a second rollout with this ID must not append to the records of the first.
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            entries = read_entries(self.folder)
            if task or not (entries and entries[0][1]) or any(head["k"] == "model" for head, _ in entries):
                raise CaptureError(f"There are records already in {self._path}.") from None
            if self.held is not None:
                held = self.hold()
                for head, _ in entries:
                    held.take(JournalEntry(head))
            self.note("model", **about)
        except OSError as exc:
            raise CaptureError(f"Cannot make {self._path}: {exc}") from exc
        else:
            self._fd, self._users, self._size, self._is_new = handle, 1, 0, True
            try:
                self.note("open", task, v=1, **about)
                if task:
                    self.sync()
            finally:
                self.release()

    # `fdatasync` takes a tenth of the CPU time of a short call, so calls of a fast model share one.
    def next_sync_s(self) -> float | None:
        """Return the seconds until the disk must get the entries so far, 0 for now; None if they need no `sync`."""
        if not self.is_durable or self.is_sync_planned:
            return None
        return max(0.0, self._synced_at + SYNC_S - time.monotonic())

    def sync(self) -> None:
        """Wait until the disk has all entries so far.

        Raises:
            JournalFull: The disk could not write them.
        """
        if not self.is_durable:
            return
        self.is_sync_planned, self._synced_at = False, time.monotonic()
        self._acquire()
        try:
            assert self._fd is not None, "`_acquire` has opened it"
            _fdatasync(self._fd)  # outside of the lock: it takes milliseconds
            if self._is_new:
                for folder in (self.folder, self.folder.parent):  # the names of the file and its folder
                    sync_path(folder)
                self._is_new = False
        except OSError as exc:
            self.failure = self.failure or f"The disk cannot write the records: {exc.strerror or exc}"
            raise JournalFull(self.failure) from exc
        finally:
            self.release()

    def reopen(self) -> RecordingBuilder:
        """Continue the file of an interrupted rollout, without a torn entry at its end; return what it has so far.

        Raises:
            CaptureError: There are no records, or they cannot be continued.
        """
        reader = RecordingReader(self._path)
        reader.advance()
        try:
            os.truncate(self._path, reader.position)
        except OSError as exc:
            raise CaptureError(f"Cannot continue {self._path}: {exc}") from exc
        builder = reader.builder
        self.continue_from(builder)
        if self.held is not None:  # has answers without token data
            held = RecordingReader(self._path, keeps_token_data=False)
            held.advance()
            self.held = held.builder
        return builder

    def continue_from(self, builder: RecordingBuilder, *, until: int | None = None) -> int:
        """Let new entries refer to the items and prompts of earlier ones; return the number of items.

        Args:
            builder: Has read the earlier entries: of this file, or of the parent's.
            until: The parent's last call that the branch continues.
        """
        for item in builder.items:
            self._numbers.setdefault(_item_digest(item), len(self._numbers))
        for number, prompt in list(builder.prompts.items())[-_RECENT_PROMPTS:]:
            if until is None or number <= until:
                with contextlib.suppress(OverflowError):
                    self._prompts.append((number, array("I", prompt)))
        self._taken = {call.number for call in builder.answers_until(until)}
        self._overhead = _CALL_COST * len(self._taken) + _ITEM_COST * len(builder.items)
        return len(builder.items)

    def replay(self, number: int) -> ReplayRecorder:
        """Return the recorder of a call that gets a recorded answer."""
        self._calls += 1
        return ReplayRecorder(self, number)

    @property
    def next_number(self) -> int:
        """Return the number of the next call.

        It is the number in this run of the agent, unless a recorded answer has it. So a resumed rollout numbers its
        calls like one that was never interrupted.
        """
        number = self._calls + 1
        return max(self._taken) + 1 if number in self._taken else number

    def begin(self, facts: Json, request: Json, sent: Json) -> CallRecorder:
        """Record a request, and return the recorder of its call.

        Raises:
            JournalFull: The request could not be written.
            RecordsTooLarge: The request would exceed `MAX_RECORDS`.
        """
        self._acquire()
        try:
            number = self.next_number
            head = {"k": "call", "n": number, "at": time.time(), **facts}
            self._append_packed(head, request, sent, is_first=True)
            self._calls += 1
            self._taken.add(number)
        except BaseException:
            self.release()
            raise
        return CallRecorder(self, number)

    def resent(self, number: int, request: Json, sent: Json) -> None:
        """Record a changed request of the same call, after the endpoint refused a parameter."""
        self._append_packed({"k": "resent", "n": number}, request, sent, is_first=False)

    def note(self, kind: str, payload: bytes = b"", **facts: Any) -> None:
        """Record an entry outside of calls: `open`, `model`, `resume`, `stop` or `note`."""
        self._acquire()
        try:
            self.append({"k": kind, "at": time.time(), **facts}, payload)
        finally:
            self.release()

    def take_over(self, folder: Path) -> None:
        """Add the calls in a journal from elsewhere; the events are here already.

        Raises:
            CaptureError: It cannot be read, or its entries cannot be written.
        """
        self._acquire()
        try:
            for head, payload in read_entries(folder):
                if head["k"] != "event":
                    self.append({**head, "k": "model"} if head["k"] == "open" else head, payload)
        finally:
            self.release()

    def event(self, event: Progress) -> None:
        """Record an event of the rollout: a phase, the result of a setup line, a command. Errors are ignored."""
        self.fact("event", event.model_dump(mode="json", exclude={"rollout_id"}, exclude_none=True))

    # No call depends on a fact. So one that cannot be written is no missing record, which would discard the rollout.
    def fact(self, kind: str, fields: Json, payload: bytes = b"") -> bool:
        """Record an entry that is not part of a call; return whether it was written."""
        entry = _entry_bytes({"k": kind, **fields, "at": time.time()}, payload)
        with self._lock, contextlib.suppress(JournalFull):
            self._acquire()
            try:
                self._write(entry)
                return True
            finally:
                self.release()
        return False

    def prompt(self, number: int, ids: list[int], *, is_separate: bool) -> None:
        """Record the IDs of a prompt: the length shared with a recent call, and the remaining IDs."""
        head: Json = {"k": "prompt", "n": number, **({"asked": True} if is_separate else {})}
        # Four bytes per ID: recent prompts of up to a million IDs stay in memory, and are compared as memory blocks.
        try:
            packed = array("I", ids)
        except (TypeError, OverflowError, ValueError):  # not IDs: recorded unchanged
            self.append({**head, "base": 0, "keep": 0, "ids": ids})
            return
        base, keep = 0, 0
        for earlier_number, earlier_ids in reversed(self._prompts):
            if len(earlier_ids) > keep:  # else it cannot share more
                shared = _shared_length(earlier_ids, packed)
                if shared > keep:
                    base, keep = earlier_number, shared
        self.append({**head, "base": base, "keep": keep, "ids": ids[keep:]})
        self._prompts.append((number, packed))

    def completed(self, number: int, completion: Completion) -> None:
        """Hand on the content of a call's recorded answer to the builder, if there is one."""
        if self.held is not None:
            self.held.completed(number, completion)

    def forget(self) -> None:
        """Release the memory for further calls, at the end of the rollout; the store waits for the disk then."""
        self.is_durable = False
        self._numbers.clear()
        self._latest.clear()
        self._prompts.clear()
        self._taken.clear()
        self.held = None

    def append(self, head: Json, payload: bytes = b"", parsed: Json | None = None) -> None:
        """Write one whole entry, or nothing. `parsed` is the value of a payload that is JSON.

        Raises:
            JournalFull: The entry could not be written. A note of the failure precedes the next successful entry.
        """
        line = _entry_bytes(head, payload)
        with self._lock:
            # A failed entry leaves no trace in the file. Without the note, a reader would take the records for
            # complete, and a trainer would train on them.
            try:
                if self._owes_note:
                    note = {"k": "note", "what": "failed", "reason": self.failure, "at": time.time()}
                    self._write(_entry_bytes(note))
                    self._owes_note = False
                    if self.held is not None:
                        self.held.take(JournalEntry(note))
                self._write(line)
            except JournalFull as exc:
                self.failure = self.failure or str(exc)
                self._owes_note = True
                raise
            if self.held is not None:
                self.held.take(JournalEntry(head, payload, parsed))

    def _write(self, data: bytes) -> None:
        assert self._fd is not None, "the records are not open"
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as exc:
            with contextlib.suppress(OSError):
                # A full disk may hold half of the entry. A reader would stop at that half, so it must go.
                os.ftruncate(self._fd, self._size)
            raise JournalFull(f"Cannot write the records: {exc.strerror or exc}") from exc
        self._size += len(data)

    def _acquire(self) -> None:
        """Open the file for one more call or note."""
        with self._lock:
            if self._fd is None:
                try:
                    self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                    self._size = os.fstat(self._fd).st_size
                except OSError as exc:
                    raise JournalFull(f"Cannot open the records: {exc}") from exc
            self._users += 1

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the file open while the block runs, for a rollout whose events are frequent."""
        try:
            self._acquire()
        except JournalFull:  # each entry tries again
            yield
            return
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Close the file after its last user."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _append_packed(self, head: Json, request: Json, sent: Json, *, is_first: bool) -> None:
        """Write the agent's request, the difference to the sent request, and the new items of both."""
        packing = _Packing(self._numbers, self._latest, [] if self.held is None else self.held.items)
        payload: Json = {"asked": packing.pack(request)} if is_first else {}
        # Only the difference between the two requests: without translation, `asked` has the conversation already.
        # `is` comes first: most values are the agent's own objects, and comparing long conversations takes time.
        changed = {
            key: value
            for key, value in sent.items()
            if key not in request or (request[key] is not value and request[key] != value)
        }
        payload["sent"] = {"set": packing.pack(changed), "unset": [key for key in request if key not in sent]}
        payload["new"] = packing.new
        content = dumps(payload)
        overhead = _CALL_COST * is_first + _ITEM_COST * len(packing.new) + _REFERENCE_COST * packing.references
        # Only a new call can be refused. A call under way must get its entries, or its tokens would be lost.
        if is_first and self._size + len(content) + self._overhead + overhead > MAX_RECORDS:
            raise RecordsTooLarge(f"the records of a rollout may take {MAX_RECORDS} bytes on disk and in memory")
        self.append(head, content, payload)
        self._numbers.update(packing.fresh)
        if self.held is not None:
            self._latest |= packing.latest
        self._overhead += overhead


class _Packing:
    """Replaces the items of one call's requests by their numbers.

    The numbers become valid when the entry is written: after a full disk, later requests must not refer to items
    without an entry.

    Args:
        numbers: The numbers of items in the file, by their digests.
        latest: By field, the runs of the last call's items.
        items: The items in memory; empty if there are none.
    """

    def __init__(self, numbers: Mapping[bytes, int], latest: Mapping[str, list[list[int]]], items: list[Any]) -> None:
        self._numbers, self._latest, self._items = numbers, latest if items else {}, items
        self.new: list[Any] = []
        self.fresh: dict[bytes, int] = {}
        self.latest: dict[str, list[list[int]]] = {}
        self.references = 0

    def pack(self, body: Json) -> Json:
        """Return a request with references to items."""
        packed: Json = {}
        for key, value in body.items():
            if key in ITEM_LISTS and isinstance(value, list):
                self.references += len(value)
                runs = self.latest[key] = _runs(self._numbers_of(key, value))
                packed[key] = {"$items": runs}
            elif key in ITEM_TEXTS and isinstance(value, str) and len(value) > _TEXT_LIMIT:
                self.references += 1
                packed[key] = {"$item": self._number_of(value)}
            elif key in ITEM_FIELDS:
                # A short text, or a value of another type. An agent's own {"$item": 7} must not be read as an item.
                packed[key] = {"$plain": value}
            else:
                packed[key] = value
        return packed

    # A conversation begins like that of the call before. To compare a message with the same place there is cheaper than
    # its digest.
    def _numbers_of(self, key: str, items: list[Any]) -> list[int]:
        earlier = self._items
        known = itertools.chain.from_iterable(range(start, start + size) for start, size in self._latest.get(key, ()))
        numbers = [
            number if item == earlier[number] and is_text_message(item) else self._number_of(item)
            for item, number in zip(items, known, strict=False)
        ]
        numbers += map(self._number_of, items[len(numbers) :])
        return numbers

    def _number_of(self, item: object) -> int:
        digest = _item_digest(item)
        number = self._numbers.get(digest, self.fresh.get(digest))
        if number is None:
            number = self.fresh[digest] = len(self._numbers) + len(self.fresh)
            self.new.append(item)
        return number


class CallRecorder:
    """Appends the entries of one call."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self.number = number

    def tried(self, status: int | None, error: Json) -> None:
        """Record a failed attempt."""
        self._append("try", {"status": status, "error": error, "at": time.time()})

    def resent(self, request: Json, sent: Json) -> None:
        """Record a changed request, after the endpoint refused a parameter."""
        self._recorder.resent(self.number, request, sent)

    def head(self, status: int, facts: Json) -> None:
        """Record the status of the answer."""
        self._append("head", {"status": status, "at": time.time(), **facts})

    def prompt(self, ids: list[int], *, is_separate: bool = False) -> None:
        """Record the IDs of the prompt; `is_separate` if they came from another route than the answer."""
        self._recorder.prompt(self.number, ids, is_separate=is_separate)

    def events(self, data: bytes) -> None:
        """Record events of a stream."""
        self._append("up", {}, data)

    def body(self, data: bytes, parsed: Json | None = None) -> None:
        """Record an answer without streaming; `parsed` is its value."""
        self._append("body", {}, data, parsed)

    def completed(self, completion: Completion) -> None:
        """Hand on the content of the recorded answer, so that it is not read a second time."""
        self._recorder.completed(self.number, completion)

    def end(self, how: str, facts: Json) -> None:
        """Record how the call ended, once."""
        try:
            self._append("end", {"how": how, "at": time.time(), **facts})
        finally:
            self._recorder.release()

    def _append(self, kind: str, facts: Json, payload: bytes = b"", parsed: Json | None = None) -> None:
        self._recorder.append({"k": kind, "n": self.number, **facts}, payload, parsed)


class ReplayRecorder(CallRecorder):
    """The recorder of a call that gets a recorded answer: its entries exist already, so its end is one short entry."""

    def head(self, status: int, facts: Json) -> None:
        """Record nothing."""

    def prompt(self, ids: list[int], *, is_separate: bool = False) -> None:
        """Record nothing."""

    def body(self, data: bytes, parsed: Json | None = None) -> None:
        """Record nothing."""

    def end(self, how: str, facts: Json) -> None:
        """Record that the agent gets the answer again."""
        if how == "complete":
            self._recorder.note("replay", n=self.number)


def _item_digest(item: object) -> bytes:
    return hashlib.blake2b(dumps(item), digest_size=16).digest()


def _runs(numbers: list[int]) -> list[list[int]]:
    """Return a list of numbers as runs, [first, count]."""
    # [0, 1, 2, 7, 8]  ->  [[0, 3], [7, 2]]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _shared_length(first: array[int], second: array[int]) -> int:
    """Return the number of equal IDs at the beginning of two lists.

    Binary search: a block of memory is compared in one step, much faster than ID by ID. Nothing is copied: a prompt may
    have a million IDs.

        [1 2 3 4 5 6 7 8] and [1 2 3 4 5 9 9 9]:  1-4 same, 5-6 differ, 5 same  ->  5
    """
    low, high = 0, min(len(first), len(second))
    left, right = memoryview(first), memoryview(second)
    if left[:high] == right[:high]:  # the usual case: the prompt continues an earlier one
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# A conversation of n calls repeats its first message n times, and the first token of its prompt. In memory, as in the
# file, each message and each token is there once:
#
#     items      A  B  C  D  E  F          shared by all calls
#     call 1     [[0, 2]]                  prompt  [1 2 3]
#     call 2     [[0, 4]]                  prompt  3 of call 1, then [4 5 6]
#     call 3     [[0, 6]]                  prompt  6 of call 2, then [7 8]


class PromptIds(abc.Sequence[int]):
    """The IDs of a prompt: a number of another prompt's IDs, and the IDs after them. Immutable.

    Raises:
        TypeError, OverflowError: a value is not an ID.
    """

    __slots__ = ("_base", "_ids", "_shared")
    _base: PromptIds | None
    _shared: int

    def __init__(self, ids: abc.Iterable[int], base: PromptIds | None = None, shared: int = 0) -> None:
        source = base
        while source is not None and shared <= source._shared:  # its own IDs are not used
            source = source._base
        self._base, self._shared = source, 0 if source is None else min(shared, len(source))
        self._ids = array("q", ids)

    def __len__(self) -> int:
        return self._shared + len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._pieces())

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, abc.Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"PromptIds({list(self)})"

    def continues(self, prompt: abc.Sequence[int], sampled: abc.Iterable[int]) -> bool:
        """Return whether these IDs were recorded as all of a prompt's, the sampled ones, and at least one more.

        Cheap, because recorded prompts refer to each other. False also if the prompt was not recorded so.
        """
        if self._base is not prompt or self._shared != len(prompt):
            return False
        answer = array("q", sampled)
        return len(self._ids) > len(answer) and self._ids[: len(answer)] == answer

    def tobytes(self) -> bytes:
        """Return the IDs as bytes, 8 for each."""
        return b"".join(map(memoryview, self._pieces()))

    def _pieces(self) -> list[array[int]]:
        pieces, end = [], len(self)
        prompt: PromptIds | None = self
        while prompt is not None:
            pieces.append(prompt._ids[: end - prompt._shared])
            end = prompt._shared
            prompt = prompt._base
        return pieces[::-1]


@dataclass(frozen=True, slots=True)
class PackedBody:
    """A request with references to the rollout's items in place of its conversation.

    `base` is the request that this one changes; None for a whole request.
    """

    fields: Json
    items: list[Any]
    base: PackedBody | None = None
    unset: frozenset[str] = frozenset()

    def unpack(self) -> Json:
        """Return the request with its conversation."""
        body = {} if self.base is None else self.base.unpack()
        for key in self.unset:
            body.pop(key, None)
        return body | _unpack(self.fields, self.items)

    def parameters(self) -> Json:
        """Return the request without its conversation."""
        body = {} if self.base is None else self.base.parameters()
        for key in self.unset:
            body.pop(key, None)
        return body | _unpack({key: value for key, value in self.fields.items() if key not in CONVERSATION}, self.items)


@dataclass(slots=True)
class Call:
    """One model call of a rollout."""

    number: int
    """From 1, in the order of arrival."""
    dialect: AgentDialectName
    """The agent's dialect."""
    endpoint_dialect: Dialect
    """The endpoint's dialect; also of `sent` and `response`."""
    path: str
    streamed: bool
    packed_request: Json | PackedBody
    packed_sent: Json | PackedBody
    started_at: float
    answer: Json | None = None
    """`response` without the IDs of the prompt."""
    status: int | None = None
    """The endpoint's HTTP status; None if it never answered."""
    error: Json | None = None
    ended: str | None = None
    """The end of the call; None if the proxy was killed during it.

    `complete`, `failed` (the endpoint answered with an error), `unreachable`, `timeout`, `broken` (the answer was cut
    off), `agent_gone`, `budget` (exhausted), `context` (the conversation is too long for the endpoint), `revoked`,
    `record_failed`.
    """
    attempts: int = 1
    tokens: int = 0
    """The tokens that it cost, as the proxy counted them."""
    spent_s: float = 0.0
    """The seconds of the rollout's budget at its end."""
    latency_s: float = 0.0
    first_byte_s: float | None = None
    policy_version: str | None = None
    """The version of the policy; of several, the oldest. None if it is unknown."""
    policy_changed: bool = False
    """Whether the policy changed during the answer, and the engine does not say at which token."""
    prompt_ids_asked: bool = False
    """Whether the IDs of the prompt came from a separate route, such as `/tokenize`."""
    reused_ids: int = 0
    """The number of prompt tokens that the proxy sent as IDs of earlier calls (`token_in`)."""
    completion: Completion = field(default_factory=Completion)
    removed: tuple[str, ...] = ()
    """Fields of the agent's request that agents may not set; they did not reach the endpoint."""
    not_trainable: tuple[str, ...] = ()
    """Reasons to exclude the answer from training, such as `tool_choice: forced tool`; empty if it is trainable."""
    unasked_sampling: tuple[str, ...] = ()
    """Differences to the trainer's sampling parameters; `not_trainable` includes them."""
    unknown_sampling: tuple[str, ...] = ()
    """Sampling parameters that no side set, so that the endpoint's defaults applied."""
    _parameters: Json | None = field(default=None, repr=False, compare=False)

    @property
    def request(self) -> Json:
        """Return the agent's request, in full; each read puts it together."""
        packed = self.packed_request
        return packed.unpack() if isinstance(packed, PackedBody) else packed

    @property
    def sent(self) -> Json:
        """Return the endpoint's request, after translation, additions and repairs; each read puts it together."""
        packed = self.packed_sent
        return packed.unpack() if isinstance(packed, PackedBody) else packed

    @property
    def sent_parameters(self) -> Json:
        """Return `sent` without the conversation: its length makes `sent` slow to put together."""
        if self._parameters is None:
            packed = self.packed_sent
            fields = packed.parameters() if isinstance(packed, PackedBody) else packed
            self._parameters = {key: value for key, value in fields.items() if key not in CONVERSATION}
        return self._parameters

    @property
    def response(self) -> Json | None:
        """Return the endpoint's answer. A stream is assembled up to its last event."""
        ids = self.completion.prompt_ids
        return self.answer if self.answer is None or ids is None else {**self.answer, "prompt_token_ids": list(ids)}

    @property
    def sampled(self) -> bool:
        """Return whether the call has an answer of the model, or a part of it."""
        return (self.answer is not None and self.error is None) or len(self.completion.sampled) > 0

    @property
    def constraints(self) -> Json:
        """Return the grammars and schemas that constrained sampling, by parameter, such as `response_format`."""
        return sampling_constraints(self.sent_parameters)

    @property
    def reader(self) -> ModelDialect:
        """Return the dialect of `sent` and `response`."""
        return DIALECTS[self.endpoint_dialect]


@dataclass(slots=True)
class Recording:
    """The records of one rollout, read from disk."""

    rollout_id: str
    path: Path
    opened_at: float = 0.0
    metadata: Json = field(default_factory=dict)
    about: Json = field(default_factory=dict)
    """The outcome, added by the store: `task_id`, `group`, `status`, `reward` and so on."""
    model: Json = field(default_factory=dict)
    budget: Json = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    stops: list[Json] = field(default_factory=list)
    """Calls that the budget answered."""
    notes: list[Json] = field(default_factory=list)
    parent: Json | None = None
    """The rollout that this one branches from: `rollout_id`, and the `call` whose answer is the last shared one."""
    resumed: int = 0
    """How often the rollout was interrupted and started again."""
    torn_bytes: int = 0
    """The size of an incomplete entry at the end: the writer was killed during a write."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry: its line, and the bytes after it."""

    head: Json
    payload: bytes = b""
    parsed: Json | None = None
    """The value of the payload; None if it was not parsed yet, or is not JSON."""

    def value(self) -> Json:
        """Return the value of a payload that is a JSON object.

        Raises:
            ValueError: it is not.
        """
        return cast("Json", loads(self.payload)) if self.parsed is None else self.parsed


_CHECKED = b'{"c":"'
_CHECKED_SIZE = len(b'{"c":"5d41402a",')
_fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS lacks it


def _entry_bytes(head: Json, payload: bytes = b"") -> bytes:
    """Return an entry as it stands in the file."""
    # {"c":"5d41402a","k":"up","n":1,"len":12}\n <12 bytes> \n
    #                ^------------- checksum of -------------^
    body = dumps({**head, "len": len(payload)}) + b"\n" + payload + b"\n" if payload else dumps(head) + b"\n"
    body = body[1:]
    return b'%s%08x",%s' % (_CHECKED, zlib.crc32(body), body)


def _entry_at(data: bytes, position: int) -> tuple[JournalEntry, int] | None:
    """Return the entry at a position and its end; None if it is incomplete, or is not as it was written."""
    end = data.find(b"\n", position)
    head = load_object(data[position:end]) if end >= 0 else None
    if head is None:
        return None
    length, start, payload = head.get("len"), end + 1, b""
    end = start
    if isinstance(length, int):
        end = start + length + 1
        # The line break after the payload proves that the payload is complete.
        if data[end - 1 : end] != b"\n":
            return None
        payload = data[start : end - 1]
    checksum = head.pop("c", None)  # older files have none
    if checksum is not None and checksum != f"{zlib.crc32(memoryview(data)[position + _CHECKED_SIZE : end]):08x}":
        return None
    return JournalEntry(head, payload), end


def _entries_in(data: bytes) -> tuple[list[JournalEntry], int]:
    """Return the complete entries in the bytes of a file, and their total size.

    Raises:
        ValueError: An entry was changed or cut off, and others come after it.
    """
    # An incomplete entry at the end is not counted in the size, and read again later: the writer was killed during a
    # write, or is writing now.
    entries: list[JournalEntry] = []
    position = 0
    while position < len(data):
        entry = _entry_at(data, position)
        if entry is None:
            later = data.find(_CHECKED, position + 1)
            while later >= 0:
                if _entry_at(data, later) is not None:
                    raise ValueError(f"no whole entry from byte {position} to byte {later}; run the rollout again")
                later = data.find(_CHECKED, later + 1)
            break
        entries.append(entry[0])
        position = entry[1]
    return entries, position


def read_entries(folder: Path) -> list[tuple[Json, bytes]]:
    """Return the lines of the complete entries in a journal, each with its bytes.

    Raises:
        CaptureError: There is none, or it is damaged.
    """
    try:
        return [(entry.head, entry.payload) for entry in _entries_in((folder / FILE).read_bytes())[0]]
    except (OSError, ValueError) as exc:
        raise CaptureError(f"Cannot read {folder / FILE}: {exc}") from exc


def read_events(folder: Path) -> list[Json]:
    """Return the events in the journal of a rollout, with one for each of its calls; none without a journal."""
    events: list[Json] = []
    turns: set[object] = set()  # of calls that another machine reported as events
    began = 0.0
    with contextlib.suppress(OSError), (folder / FILE).open("rb") as file:
        while (line := file.readline()).endswith(b"\n"):
            head = load_object(line)
            if head is None:
                break
            head.pop("c", None)
            kind, at = head.pop("k", None), float(head.get("at") or 0.0)
            if kind in ("open", "resume"):
                began = at
            elif kind == "event":
                events.append(head)
                turns.add(head.get("turn"))
            elif kind in ("call", "replay") and (number := head.get("n")) not in turns:
                message = f"model call {number}" if kind == "call" else f"model call {number} again"
                about: Json = {"phase": "agent", "message": message, "turn": number}
                events.append({**about, "elapsed_s": max(0.0, at - began), "at": at})
            if isinstance(size := head.get("len"), int):
                file.seek(size + 1, os.SEEK_CUR)  # the bytes of an entry are not read
    return events


def read(path: Path | str) -> Recording:
    """Read the records of a rollout: its folder, or the file in it.

    Raises:
        CaptureError: there are none, or they are not such records.
    """
    reader = RecordingReader(path)
    calls = [*reader.advance(), *reader.unfinished()]
    return replace(reader.recording, calls=sorted(calls, key=lambda call: call.number))


def read_opening(folder: Path) -> JournalEntry:
    """Return the first entry in the journal of a rollout; its bytes are the task.

    Raises:
        CaptureError: There is none, or it is damaged.
    """
    try:
        with (folder / FILE).open("rb") as file:
            line = file.readline()
            size = (load_object(line) or {}).get("len")
            entry = _entry_at(line + file.read(size + 1) if isinstance(size, int) else line, 0)
    except OSError as exc:
        raise CaptureError(f"Cannot read {folder / FILE}: {exc}") from exc
    if entry is None:
        raise CaptureError(f"{folder / FILE} is damaged: its first entry is not as it was written")
    return entry[0]


def has_records(folder: Path) -> bool:
    """Return whether a folder has a journal, whole or damaged; a file without a whole entry is removed."""
    with contextlib.suppress(CaptureError):
        return bool(read_opening(folder))
    file = folder / FILE
    try:
        if _entries_in(file.read_bytes())[0]:
            return True
        file.unlink()  # the engine was killed while it wrote the first entry
    except FileNotFoundError:
        pass
    except ValueError:
        return True
    except OSError as exc:
        raise CaptureError(f"Cannot read {file}: {exc}") from exc
    return False


class RecordingBuilder:
    """Turns entries into calls, in their order.

    Args:
        file: The file that the entries are in.
        keeps_token_data: Whether the answers of calls include log-probabilities and IDs of sampled tokens, as the
            endpoint sent them. `Call.completion` has them in any case, in a tenth of the memory.
    """

    def __init__(self, file: Path, *, keeps_token_data: bool = True) -> None:
        self._file = file
        self._keeps_token_data = keeps_token_data
        self.items: list[Any] = []
        """The items of all requests, by number."""
        self._drafts: dict[int, _Draft] = {}
        self.prompts: dict[int, PromptIds] = {}
        """The prompts by call: prompts of later calls refer to them."""
        self.answered: dict[int, Call] = {}
        """The calls with a whole answer by number, those of the parent and of interrupted runs included."""
        self.unanswered: list[Call] = []
        """The other calls of interrupted runs."""
        self._recording: Recording | None = None
        self._calls: list[Call] = []

    @property
    def recording(self) -> Recording:
        """Return the recording without its calls; `calls` is empty."""
        if self._recording is None:
            raise CaptureError(f"{self._file} does not hold records of a rollout.")
        return self._recording

    def whole(self) -> Recording:
        """Return the recording with all calls, those under way included."""
        calls = [*self._calls, *self.unfinished()]
        return replace(self.recording, calls=sorted(calls, key=lambda call: call.number))

    def take(self, entry: JournalEntry) -> None:
        """Take one entry.

        Raises:
            CaptureError: The first entry does not open a recording.
        """
        kind, number = entry.head.get("k"), entry.head.get("n")
        if self._recording is None:
            if kind != "open":
                raise CaptureError(f"{self._file} does not hold records of a rollout.")
            rollout_id, opened_at = str(entry.head.get("rollout_id", "")), entry.head.get("at", 0.0)
            self._recording = Recording(rollout_id, self._file, opened_at)
            self._describe(entry.head)
        elif kind == "model":
            self._describe(entry.head)
        elif kind == "call":
            self._drafts[entry.head["n"]] = _Draft(_call(entry, self.items))
        elif kind == "replay":
            self._calls.append(self.answered[entry.head["n"]])
        elif kind == "resume":
            self._begin_again()
            self._describe(entry.head)
        elif kind in ("stop", "note"):
            (self._recording.stops if kind == "stop" else self._recording.notes).append(entry.head)
        elif number in self._drafts:
            self._take_part(self._drafts[number], entry)

    def _take_part(self, draft: _Draft, entry: JournalEntry) -> None:
        """Take an entry of a call under way."""
        kind, number = entry.head["k"], entry.head["n"]
        if kind == "prompt":
            self._take_prompt(entry)
        elif kind == "resent":
            _resend(draft.call, entry.value(), self.items)
        else:
            draft.feed(entry)
        if kind == "end":
            del self._drafts[number]
            call = self._finished(draft)
            self._calls.append(call)
            if call.ended == "complete":
                self.answered[number] = call
            else:
                self.unanswered.append(call)

    def _begin_again(self) -> None:
        """Forget the run of the agent that was interrupted; its answers can be replayed."""
        recording = self.recording
        recording.resumed += 1
        recording.stops, recording.notes = [], []
        self.unanswered += self.unfinished()
        self._drafts.clear()
        self._calls.clear()

    def _describe(self, head: Json) -> None:
        """Take the facts about the calls, and the shared calls of the rollout that this one branches from.

        Raises:
            CaptureError: The records of that rollout cannot be read.
        """
        for name in ("metadata", "model", "budget"):
            if head.get(name):
                setattr(self.recording, name, head[name])
        parent = self.recording.parent = head.get("parent") or self.recording.parent
        if parent is None or "parent" not in head:
            return
        # <captures>/PARENT/calls.log, beside <captures>/BRANCH/calls.log
        reader = RecordingReader(
            self._file.parent.parent / parent["rollout_id"], keeps_token_data=self._keeps_token_data
        )
        reader.advance()
        shared = reader.builder
        self.items = shared.items[: parent["items"]]
        last = parent["call"]
        self.prompts = {number: prompt for number, prompt in shared.prompts.items() if last is None or number <= last}
        for call in shared.answers_until(last):
            shared_too = (SHARED,) if parent.get("is_branch", True) else ()
            self.answered[call.number] = replace(call, not_trainable=(*call.not_trainable, *shared_too))

    def answers_until(self, number: int | None) -> list[Call]:
        """Return the calls with a whole answer up to a number, in their order."""
        return [self.answered[each] for each in sorted(self.answered) if number is None or each <= number]

    def completed(self, number: int, completion: Completion) -> None:
        """Take the content of a call's answer, which is not read again then."""
        if number in self._drafts:
            self._drafts[number].completion = completion

    def take_ended(self) -> list[Call]:
        """Return the calls that ended since the last time."""
        ended, self._calls = self._calls, []
        return ended

    def unfinished(self) -> list[Call]:
        """Return the calls without an end, up to their last entry."""
        return [self._finished(draft) for draft in list(self._drafts.values())]

    def _take_prompt(self, entry: JournalEntry) -> None:
        head = entry.head
        draft = self._drafts[head["n"]]
        draft.call.prompt_ids_asked = bool(head.get("asked"))
        try:
            # Calls start at 1. Base 0 means that this prompt shares nothing with an earlier one.
            prompt = PromptIds(head["ids"], self.prompts.get(head["base"]), head["keep"])
        except (TypeError, OverflowError):  # the engine sent something else than IDs
            draft.prompt_ids = tuple(head["ids"])
        else:
            draft.prompt_ids = self.prompts[head["n"]] = prompt

    def _finished(self, draft: _Draft) -> Call:
        call = draft.finished(keeps_token_data=self._keeps_token_data)
        model, sent = self.recording.model, call.sent_parameters
        wanted = model.get("sampling") or {}
        call.unasked_sampling = unasked_sampling(wanted, sent)
        call.unknown_sampling = unknown_sampling(wanted, sent, call.endpoint_dialect, model.get("engine"))
        call.not_trainable += call.unasked_sampling
        return call


class RecordingReader:
    """Reads the records of a rollout step by step, while calls are still being added.

    Raises:
        CaptureError: there are none, or they are not such records.
    """

    def __init__(self, path: Path | str, *, keeps_token_data: bool = True) -> None:
        file = Path(path)
        self._file = file / FILE if file.is_dir() else file
        self.position = 0
        """The size of the entries that were read."""
        self.builder = RecordingBuilder(self._file, keeps_token_data=keeps_token_data)

    @property
    def recording(self) -> Recording:
        """Return the recording without its calls; `calls` is empty."""
        return self.builder.recording

    def advance(self) -> list[Call]:
        """Read the new entries, and return the calls that they end."""
        try:
            if self._file.exists() and not self._file.is_file():  # reading a pipe or a device would not end
                raise CaptureError(f"Cannot read {self._file}: it is not an ordinary file")
            with self._file.open("rb") as file:
                file.seek(self.position)
                data = file.read()
        except OSError as exc:
            raise CaptureError(f"Cannot read {self._file}: {exc}") from exc
        with self._damage_named():
            entries, size = _entries_in(data)
            self.position += size
            for entry in entries:
                self.builder.take(entry)
        self.recording.torn_bytes = len(data) - size
        return self.builder.take_ended()

    def unfinished(self) -> list[Call]:
        """Return the calls without an end, up to their last entry."""
        with self._damage_named():
            return self.builder.unfinished()

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        """Raise the errors of damaged entries as `CaptureError`."""
        try:
            yield
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as exc:
            raise CaptureError(f"{self._file} is damaged: {type(exc).__name__}: {exc}") from exc


def _call(entry: JournalEntry, items: list[Any]) -> Call:
    head, body = entry.head, entry.value()
    items.extend(body["new"])
    request = PackedBody(body["asked"], items)
    call = Call(
        number=head["n"],
        dialect=cast("AgentDialectName", head["dialect"]),
        endpoint_dialect=cast("Dialect", head["to"]),
        path=head.get("path", ""),
        streamed=bool(head.get("stream")),
        packed_request=request,
        packed_sent=request,
        started_at=head["at"],
        removed=tuple(head.get("removed", ())),
    )
    _resend(call, {**body, "new": []}, items)  # `items` has the new items already
    reasons = head.get("not_trainable")  # older records have none
    call.not_trainable = steering(call.endpoint_dialect, call.sent) if reasons is None else tuple(reasons)
    return call


def _resend(call: Call, body: Json, items: list[Any]) -> None:
    """Set `sent`: the agent's request with some fields changed and others removed."""
    items.extend(body["new"])
    request = call.packed_request
    assert isinstance(request, PackedBody)
    call._parameters = None
    call.packed_sent = PackedBody(body["sent"]["set"], items, request, frozenset(body["sent"]["unset"]))


def _unpack(packed: Json, items: list[Any]) -> Json:
    body: Json = {}
    for key, value in packed.items():
        if key in ITEM_FIELDS:
            if "$items" in value:
                value = [item for start, count in value["$items"] for item in items[start : start + count]]
            elif "$item" in value:
                value = items[value["$item"]]
            elif "$plain" in value:
                value = value["$plain"]
        body[key] = value
    return body


class _Draft:
    """A call, while its entries are read."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.prompt_ids: abc.Sequence[int] | None = None
        self.completion: Completion | None = None
        """The content of the answer, if it was read already."""
        self._events: list[bytes] = []
        self._body: JournalEntry | None = None
        self._last_at = call.started_at

    def feed(self, entry: JournalEntry) -> None:
        head, call = entry.head, self.call
        kind = head["k"]
        self._last_at = head.get("at", self._last_at)
        if kind == "try":
            call.attempts += 1
            call.status, call.error = head.get("status"), head.get("error")
        elif kind == "head":
            call.status, call.error = head["status"], None  # the attempts before this one no longer matter
            call.first_byte_s = head["at"] - call.started_at
            call.policy_version = head.get("policy")
            call.reused_ids = head.get("reused_ids", 0)
        elif kind == "up":
            self._events.append(entry.payload)
        elif kind == "body":
            self._body = entry
        elif kind == "end":
            call.ended = head["how"]
            call.error = head.get("error") or call.error
            if call.error is not None and call.error.get("status") is not None:
                call.status = call.error["status"]
            call.policy_version = head.get("policy") or call.policy_version
            call.policy_changed = head.get("policy_changed", False)
            call.attempts = head.get("attempts", call.attempts)
            call.tokens, call.spent_s = head.get("tokens", 0), head.get("seconds", 0.0)

    def finished(self, *, keeps_token_data: bool) -> Call:
        call = replace(self.call)  # a call under way is finished again, with its next entries
        call.latency_s = max(0.0, self._last_at - call.started_at)
        response = self._assembled() if self._body is None else self._body.parsed or load_object(self._body.payload)
        if response is None:
            return call
        call.answer = response
        if call.status is not None and call.status >= 400:
            return call  # the body is an error, not a completion
        try:
            call.completion = self.completion or call.reader.completion(response)
            if self.prompt_ids:  # the recorder moved them into a `prompt` entry
                call.completion = replace(call.completion, prompt_ids=self.prompt_ids)
            if not keeps_token_data:
                call.answer = call.reader.strip_response(response, _TOKEN_DATA)
        except MALFORMED as exc:
            call.error = call.error or {"message": f"the answer cannot be read: {exc}"}
        call.error = call.error or call.completion.error
        if len(call.completion.version_spans) > 1:
            call.policy_version, call.policy_changed = call.completion.policy_version, False
        elif call.policy_changed:
            call.policy_version = None
        else:
            call.policy_version = call.policy_version or call.completion.policy_version
        return call

    def _assembled(self) -> Json | None:
        if not self._events:
            return None
        assembler = self.call.reader.assembler()
        for event in EventSplitter().feed(b"".join(self._events)):
            data = event_data(event)
            chunk = load_object(data) if data is not None and data != STREAM_DONE else None
            if chunk is not None:
                with contextlib.suppress(*MALFORMED):  # the engine's other events can still be read
                    assembler.feed(chunk)
        return assembler.response()
