"""The store of rollouts: append-only shards, an index, and each rollout's task, work tree and model calls.

A rollout is stored as soon as a shard contains its line; its files are written before. Stored data is never changed:
verifying again appends another record. Any number of processes may write to one store.
"""

# rollouts/                                     a store
#   shards/20261116T041300-812-9f3c2a1b.jsonl   one file per writing process, one record per line, only appended to:
#                                                 {"format":1,"record_id":"5e0c","rollout_id":"a41f","kind":"rollout",
#                                                  "sequence":0,"stored_at":1794802380.1,"outcome":{...},"task":{...}}
#   index.sqlite                                the position of each record, and the columns of `find`; can be deleted
#   captures/a41f.../calls.log                  the journal, from the first moment of a rollout: its task, agent and
#                                               options, then phases, setup results, commands, model calls, limits
#   running/a41f...                             exists until the rollout has a record; locked while it runs. With a free
#                                               lock, the rollout is interrupted
#   rollouts/a41f.../agent.log                  the agent's output, written while it runs
#                    worktree.tar, baseline.tar
#                    steps.jsonl                 of a played episode: its reset and its steps
#   .verdicts                                   locked while a verdict gets its number, which orders the verdicts of a
#                                               rollout: clocks of machines differ and can be set back
#   runs/..., streams/...                       which rollout belongs to which task of a batch or stream, for `resume`
#
# The order of writes makes a crash harmless: files first (with a hidden name, then renamed), then the line with fsync.
# A line counts only with its newline, so an incomplete line is never read. Readers bring the index up to date.

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from openenv.errors import CaptureError, StoreError
from openenv.rollout.capture.records import FILE, Recorder, has_records, read_events, read_opening
from openenv.rollout.store.outcome import Outcome, group_of, sequence_of
from openenv.rollout.store.rollout_index import (
    EVERY_RECORD,
    FIRST,
    LAST,
    CurvePoint,
    Grouping,
    Order,
    RolloutFilter,
    RolloutIndex,
    RolloutRow,
    RolloutStats,
)
from openenv.rollout.tasks.checks import AS_STORED
from openenv.rollout.tasks.task import BranchPoint, Task
from openenv.sandboxes.host import is_locked, open_locked, sync_path, try_locked

logger = logging.getLogger(__name__)

Kind = Literal["rollout", "reverify"]
STEPS_FILE = "steps.jsonl"
"""The file with the steps of a played episode, in the rows of recorded episodes."""
_FORMAT = 1
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLOCK = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class ShardWriter:
    """Appends lines to a private shard, created with the first line; safe from many threads and after a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._path = folder
        self._owner = 0

    def append(self, record: dict[str, Any]) -> None:
        """Write a line, and wait until it is on the disk.

        Raises:
            OSError: it could not be written; no part of it remains.
        """
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            handle = self._open()
            # Unbuffered, because after an error a buffer would keep a part of the line and write it later.
            offset = os.lseek(handle, 0, os.SEEK_END)
            try:
                _write_all(handle, line)
                os.fsync(handle)
            except OSError:
                self._truncate(handle, offset)
                raise

    def close(self) -> None:
        """Close the file; a later line starts another shard."""
        with self._lock:
            self._drop()

    def _open(self) -> int:
        if self._handle is not None and self._owner != os.getpid():
            self._drop()  # the parent process still writes to the old shard
        if self._handle is None:
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            self._path = self._folder / f"{stamp}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
            self._handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._owner = os.getpid()
            sync_path(self._folder)
        return self._handle

    def _truncate(self, handle: int, offset: int) -> None:
        try:
            os.ftruncate(handle, offset)
        except OSError:
            logger.warning("an incomplete line remains in %s", self._path)
            self._drop()  # a line after an incomplete one would be lost

    def _drop(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


class Record(BaseModel):
    """One stored line: a rollout, or a later verification of it."""

    model_config = ConfigDict(frozen=True)

    record_id: str
    rollout_id: str
    kind: Kind
    verdict: str
    """`first` for the rollout itself, else the name of the later verdict."""
    sequence: int = 0
    """The number of the verdict, which orders the verdicts of a rollout: 0 for the rollout itself."""
    stored_at: float
    outcome: Outcome
    task: Task
    """The task with the checks of this verdict."""

    @model_validator(mode="before")
    @classmethod
    def _name_verdict(cls, data: Any) -> Any:
        """Name and number the verdict of old records, which have neither."""
        if not isinstance(data, dict) or "kind" not in data:
            return data
        name = data.get("verdict") or (FIRST if data["kind"] == "rollout" else data.get("record_id"))
        return {**data, "verdict": name, "sequence": sequence_of(data)}

    @property
    def group(self) -> str:
        """The group of the rollout: `group` in its metadata, or else in the metadata of its task."""
        return group_of(self.outcome.metadata, self.task.metadata)


class BegunRollout(BaseModel):
    """A rollout without a record, as its journal describes it."""

    model_config = ConfigDict(frozen=True)

    rollout_id: str
    task_id: str = ""
    group: str = ""
    agent: str = ""
    model: str = ""
    sandbox: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)
    """The options of its engine, for `resume`; empty for rollouts without an engine."""
    start: BranchPoint | None = None
    """The call of another rollout at which it started."""
    began_at: float = 0.0
    is_running: bool = True
    """False if its engine died."""
    damage: str = ""
    """Why its journal cannot be read; then the other fields are empty."""


def check_is_no_folder(store: object) -> None:
    """Check that a `store` argument is a store: commands take its folder, functions the open store.

    Raises:
        TypeError: it is a path.
    """
    if isinstance(store, str | Path):
        raise TypeError(f"store is a folder; pass an open store: with RolloutStore({str(store)!r}) as store: ...")


def require_store(root: Path) -> None:
    """Check that a folder is a store of rollouts.

    Raises:
        StoreError: it is not a store, or does not exist.
    """
    if not (root / "shards").is_dir():
        what = "is no store of rollouts" if root.exists() else "does not exist"
        raise StoreError(f"There are no rollouts in {root}: it {what}")


def is_unused(root: Path) -> bool:
    """Return whether a folder is missing or empty, so that a store may appear there later."""
    return not root.exists() or (root.is_dir() and next(root.iterdir(), None) is None)


class RolloutStore:
    """A folder of rollouts; a context manager, usable from any thread.

    Args:
        root: The folder.
        create: Create the folder if it does not exist.

    Raises:
        StoreError: the folder cannot be created, or does not exist.
    """

    def __init__(self, root: str | Path, *, create: bool = True) -> None:
        self.root = Path(root)
        self._shards = self.root / "shards"
        self._rollouts = self.root / "rollouts"
        self._marks = self.root / "running"
        self.captures = self.root / "captures"
        """The folder of the journals."""
        if not create:
            require_store(self.root)
        with _as_store_error("opened"):
            for folder in (self._shards, self._rollouts, self._marks, self.captures):
                folder.mkdir(parents=True, exist_ok=True)
        self._writer = ShardWriter(self._shards)
        self._index = RolloutIndex(self.root / "index.sqlite", self._shards)
        self._running: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, rollout_id: str, task: Task, *, about: Mapping[str, Any] | None = None) -> None:
        """Begin the journal of a rollout, and mark it as running. Without a record, it is listed as interrupted later.

        Args:
            rollout_id: Its ID.
            task: Its task.
            about: Its description for `running`: `agent`, `model`, `sandbox`, `group`, `metadata`, `engine`,
                `start`.

        Raises:
            StoreError: the ID is in use, or the disk is full.
        """
        self._claim(rollout_id)
        try:
            with _as_store_error("begun"):
                with self._lock:
                    self._running[rollout_id] = open_locked(self._marks / rollout_id)
                journal = Recorder(self.captures / rollout_id / FILE, is_durable=True)
                begun = {**(about or {}), "task_id": task.task_id}
                journal.create({"rollout_id": rollout_id, "begun": begun}, task.model_dump_json().encode())
                for place in (self._rollouts, self._marks):
                    sync_path(place)
        except BaseException:
            self._forget(rollout_id)
            raise

    def _claim(self, rollout_id: str) -> None:
        """Use an ID for one rollout.

        Raises:
            StoreError: it is in use, or the disk is full.
        """
        folder = self._folder(rollout_id)
        try:
            with _as_store_error("begun"):
                folder.mkdir()  # fails if this or another process uses the ID
        except FileExistsError:
            raise StoreError(f"There is a rollout '{rollout_id}' already") from None

    def _forget(self, rollout_id: str) -> None:
        """Remove a rollout that ran nothing."""
        self._unmark(rollout_id)
        for folder in (self._rollouts, self.captures):
            shutil.rmtree(folder / rollout_id, ignore_errors=True)

    def resume(self, rollout_id: str) -> tuple[Task, BegunRollout]:
        """Mark an interrupted rollout as running again; return its task and its description.

        Raises:
            StoreError: it has ended, runs in another process, was interrupted before it had a task, or its journal is
                damaged.
        """
        is_there = self._folder(rollout_id).is_dir()
        handle = try_locked(self._marks / rollout_id) if is_there else None
        if handle is None:
            how = "runs in another process" if is_there else "does not exist"
            raise StoreError(f"The rollout '{rollout_id}' cannot be resumed: it {how}")
        with self._lock:
            self._running[rollout_id] = handle
        if stored_outcome(self, rollout_id) is not None:
            self._unmark(rollout_id)  # its engine died after it had stored the outcome
            raise StoreError(f"The rollout '{rollout_id}' cannot be resumed: it has ended")
        try:
            return self.task(rollout_id), self.begun(rollout_id)
        except StoreError as exc:
            self.release(rollout_id)
            raise StoreError(f"The rollout '{rollout_id}' cannot be resumed: {exc}") from exc

    def release(self, rollout_id: str) -> None:
        """Stop marking a rollout as running: without a record, it is interrupted."""
        with self._lock:
            handle = self._running.pop(rollout_id, None)
        if handle is not None:
            os.close(handle)

    def add(
        self,
        outcome: Outcome,
        task: Task,
        *,
        worktree: Path | None = None,
        baseline: Path | None = None,
        agent_log: Path | None = None,
    ) -> Record:
        """Store an outcome with copies of the files that exist.

        Raises:
            StoreError: the disk is full, or the rollout was stored before; the outcome is not listed.
        """
        rollout_id = outcome.rollout_id
        if rollout_id not in self._running:  # no engine of this process started it
            self._claim(rollout_id)
        folder = self._folder(rollout_id)
        sources = {"worktree.tar": worktree, "baseline.tar": baseline, "agent.log": agent_log}
        try:
            with _as_store_error("stored", outcome):
                for name, source in sources.items():
                    if source is not None and source.exists():
                        _copy(source, folder / name)
                if outcome.turns:
                    for path in (self.captures / rollout_id).glob("*"):
                        sync_path(path)
                record = self._append("rollout", outcome, task)
                outcome.keep_sequences(self.captures / rollout_id)
                return record
        except StoreError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self._unmark(rollout_id)

    def add_lost(self, outcome: Outcome, task: Task) -> Outcome:
        """Store the outcome of a rollout whose process has died, and return it.

        If that process had stored an outcome before it died, return that one.

        Raises:
            StoreError: the disk is full.
        """
        rollout_id = outcome.rollout_id
        with contextlib.suppress(StoreError):
            return self.get(rollout_id).outcome
        mark = self._marks / rollout_id
        if mark.exists():  # the kernel has freed the lock of the dead process
            with self._lock:
                self._running[rollout_id] = open_locked(mark)
        self.add(outcome, task)
        return outcome

    def keep_capture(self, rollout_id: str, records: Path) -> None:
        """Add the calls in a journal elsewhere, with the recorded files beside it, to that of a running rollout.

        Raises:
            StoreError: the disk is full, or the journal is damaged.
        """
        place = self.captures / rollout_id
        with _as_store_error("stored"):
            for path in records.rglob("*"):
                if path.is_file() and path.name != FILE:
                    (target := place / path.relative_to(records)).parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)
            if has_records(records):
                Recorder(place / FILE).take_over(records)

    def add_verification(self, outcome: Outcome, task: Task, *, verdict: str | None = None) -> Record:
        """Append another verdict on a stored rollout. Earlier verdicts remain, and the first is still the default.

        Args:
            outcome: The outcome with its new verdict.
            task: The task with the checks of this verdict.
            verdict: The name of the verdict, the same for all rollouts verified together; by default a new ID.

        Raises:
            StoreError: the rollout does not exist, it has a verdict of that name, or the disk is full.
        """
        verdict = secrets.token_hex(4) if verdict is None else verdict
        check_verdict_name(verdict)
        with _as_store_error("stored", outcome), os.fdopen(open_locked(self.root / ".verdicts")):
            rows = self._rows(outcome.rollout_id)
            if any(row.verdict == verdict for row in rows):
                raise StoreError(f"The rollout '{outcome.rollout_id}' has a verdict '{verdict}' already")
            return self._append("reverify", outcome, task, verdict=verdict, sequence=rows[0].sequence + 1)

    def get(self, rollout_id: str, *, record_id: str | None = None, verdict: str = FIRST) -> Record:
        """Return a rollout with its first verdict, or with a later one.

        Args:
            rollout_id: Its ID; a unique prefix is enough.
            record_id: The ID of a record, instead of a verdict.
            verdict: `first`, `last`, or the name of a verdict; a unique prefix is enough.

        Raises:
            StoreError: the record does not exist.
        """
        history = self.history(rollout_id)
        if record_id is not None:
            chosen = [record for record in history if record.record_id == record_id]
        elif verdict in (FIRST, LAST):
            chosen = history[-1:] if verdict == FIRST else history[:1]
        else:
            chosen = [record for record in history if record.verdict == verdict]
            chosen = chosen or [record for record in history if record.verdict.startswith(verdict)]
        if len(chosen) != 1:
            what = f"record '{record_id}'" if record_id is not None else f"verdict '{verdict}'"
            how = "has no" if not chosen else "has several verdicts that begin so, not one"
            raise StoreError(f"The rollout '{rollout_id}' {how} {what}")
        return chosen[0]

    def history(self, rollout_id: str) -> list[Record]:
        """Return all records of a rollout, newest verdict first.

        Raises:
            StoreError: the rollout does not exist.
        """
        return [self.read(row) for row in self._rows(rollout_id)]

    def _rows(self, rollout_id: str) -> list[RolloutRow]:
        rows = self._index.find(EVERY_RECORD.having({"rollout_id": self.resolve(rollout_id)}))
        return sorted(rows, key=attrgetter("sequence", "stored_at", "record_id"), reverse=True)

    def running(self) -> list[BegunRollout]:
        """Return the running and interrupted rollouts of all processes, the newest first."""
        self._index.sync()
        rollouts = [self._unfinished(mark) for mark in self._marks.iterdir()]
        return sorted(filter(None, rollouts), key=lambda each: each.began_at, reverse=True)

    def unfinished(self, rollout_id: str) -> BegunRollout | None:
        """Return a running or interrupted rollout; None if it does not exist or has ended."""
        self._index.sync()
        return self._unfinished(self._marks / self._folder(rollout_id).name)

    def _unfinished(self, mark: Path) -> BegunRollout | None:
        is_running = is_locked(mark)
        if not mark.exists() or self._index.count(RolloutFilter(rollout_id=mark.name)):
            return None
        try:
            begun = self.begun(mark.name)
        except StoreError as exc:
            begun = BegunRollout(rollout_id=mark.name, damage=str(exc))
        return begun.model_copy(update={"is_running": is_running})

    def begun(self, rollout_id: str) -> BegunRollout:
        """Return the description of a rollout from its journal, whether it has ended or not.

        Raises:
            StoreError: it has no journal with a description, or a damaged one.
        """
        head, _ = self._opening(rollout_id)
        try:
            begun = {**head["begun"], "rollout_id": rollout_id, "began_at": head["at"]}
            return BegunRollout.model_validate(begun)
        except (LookupError, TypeError, ValueError) as exc:
            raise StoreError(f"The journal of rollout '{rollout_id}' does not describe it: {exc}") from exc

    def _opening(self, rollout_id: str) -> tuple[dict[str, Any], bytes]:
        try:
            entry = read_opening(self.captures / self._folder(rollout_id).name)
        except CaptureError as exc:
            raise StoreError(str(exc)) from exc
        return entry.head, entry.payload

    def live_file(self, rollout_id: str, name: str) -> Path:
        """Return the path of a file that is written during the rollout, such as `agent.log`."""
        return self._folder(rollout_id) / name

    def events(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return the events of a rollout so far: `phase`, `message`, `turn`, `elapsed_s`, `at`, `facts`."""
        return read_events(self.captures / rollout_id)

    def resolve(self, rollout_id: str) -> str:
        """Return the ID of a rollout from a unique prefix.

        Raises:
            StoreError: no rollout, or several, have this prefix.
        """
        self._index.sync()
        ids = self._index.beginning("rollout_id", rollout_id) if rollout_id else []
        if len(ids) == 1:
            return ids[0]
        how = "There is no rollout" if not ids else "There are several rollouts that begin with"
        raise StoreError(f"{how} '{rollout_id}' in {self.root}")

    def resolve_verdict(self, verdict: str) -> str:
        """Return the name of a verdict from a unique prefix; `first` and `last` are returned unchanged.

        Raises:
            StoreError: no verdict, or several, have this prefix.
        """
        if verdict in (FIRST, LAST):
            return verdict
        self._index.sync()
        names = self._index.beginning("verdict", verdict) if verdict else []
        if len(names) == 1:
            return names[0]
        how = "There is no verdict" if not names else "There are several verdicts that begin with"
        raise StoreError(f"{how} '{verdict}' in {self.root}")

    def find(
        self,
        where: RolloutFilter | None = None,
        *,
        order: Order = "newest",
        limit: int | None = None,
        offset: int = 0,
        latest: bool | None = None,
        **conditions: Any,
    ) -> list[RolloutRow]:
        """Return rows of the index, newest first; by default each rollout with its first verdict.

        Args:
            where: The rollouts to return.
            order: The order of the rows.
            limit: The largest number of rows.
            offset: The number of rows to skip.
            latest: True means `verdict="last"`; False means `verdict=None`, all records.
            conditions: Fields of `RolloutFilter`, such as `task_id`, `status` or `verdict`.

        Raises:
            ValueError: a condition does not exist.
        """
        where = (where or RolloutFilter()).having(conditions)
        if latest is not None:
            where = where.having({"verdict": LAST if latest else None})
        self._index.sync()
        return self._index.find(where, order=order, limit=limit, offset=offset)

    def count(self, where: RolloutFilter | None = None, **conditions: Any) -> int:
        """Return the number of rollouts; takes the conditions of `find`."""
        self._index.sync()
        return self._index.count((where or RolloutFilter()).having(conditions))

    def stats(
        self,
        where: RolloutFilter | None = None,
        *,
        by: Grouping | None = None,
        limit: int | None = None,
        **conditions: Any,
    ) -> list[RolloutStats]:
        """Return means, deviations and pass rates of rollouts; takes the conditions of `find`.

        Args:
            by: The column to group by, the most frequent value first; None for one line over all rollouts.
            limit: The largest number of lines.
        """
        self._index.sync()
        return self._index.stats((where or RolloutFilter()).having(conditions), by=by, limit=limit)

    def curve(
        self,
        where: RolloutFilter | None = None,
        *,
        by: Grouping | None = None,
        over: Literal["time", "policy_version"] = "time",
        lines: int = 8,
        **conditions: Any,
    ) -> list[CurvePoint]:
        """Return learning curves: the mean reward and the pass rate over time, or by version of the policy.

        Takes the conditions of `find`. Only rollouts with a reward count.

        Args:
            by: The column with a curve for each of its values; None for one curve over all rollouts.
            over: The axis: time in 40 intervals, or the version of the policy.
            lines: The largest number of curves, those of the most frequent values.
        """
        self._index.sync()
        return self._index.curve((where or RolloutFilter()).having(conditions), by=by, over=over, lines=lines)

    def beside(
        self, rollout_id: str, where: RolloutFilter | None = None, *, order: Order = "newest"
    ) -> tuple[str | None, str | None]:
        """Return the IDs of the rollouts before and after one in the list of `find`; None at its ends."""
        self._index.sync()
        return self._index.beside(where or RolloutFilter(), rollout_id, order=order)

    def names(self, column: Grouping, *, limit: int = 1000) -> list[tuple[str, int]]:
        """Return the values of a column and their counts, the most frequent first.

        For `verdict`, the names of later verdicts.
        """
        self._index.sync()
        return self._index.names(column, limit=limit)

    def read(self, row: RolloutRow) -> Record:
        """Return the record of a row.

        Raises:
            StoreError: the record no longer exists.
        """
        try:
            with (self._shards / row.shard).open("rb") as file:
                file.seek(row.offset)
                record = Record.model_validate(json.loads(file.read(row.length)), context=AS_STORED)
        except (OSError, ValueError, RecursionError) as exc:
            raise StoreError(f"The record of rollout '{row.rollout_id}' cannot be read: {exc}") from exc
        record.outcome.keep_sequences(self.captures / record.rollout_id)
        return record

    def records(
        self, where: RolloutFilter | None = None, *, limit: int | None = None, **conditions: Any
    ) -> Iterator[Record]:
        """Yield the rollouts, oldest first; takes the conditions of `find`."""
        for row in reversed(self.find(where, limit=limit, **conditions)):
            yield self.read(row)

    def file(self, rollout_id: str, name: str) -> Path | None:
        """Return a stored file of a rollout (`worktree.tar`, `baseline.tar`, `agent.log`), or None."""
        path = self._folder(self.resolve(rollout_id)) / name
        return path if path.is_file() else None

    def to_dataset(self, where: RolloutFilter | None = None, **conditions: Any) -> Any:
        """Return the sequences of rollouts as a `datasets.Dataset`, with the columns of a Parquet export.

        Args:
            where: The rollouts to return; by default all, each with its first verdict.
            conditions: Fields of `RolloutFilter`, such as `task_id`, `status` or `verdict`.

        Raises:
            ImportError: the package `datasets` is not installed.
            StoreError: a record cannot be read.
        """
        try:
            import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
            import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as exc:
            raise ImportError("A dataset needs the package datasets: pip install datasets") from exc
        from openenv.rollout.capture.export import tables  # needed only here
        from openenv.rollout.store.exports import recording  # imports this module

        recordings = (recording(self, record) for record in self.records(where, **conditions))
        return datasets.Dataset(pyarrow.concat_tables(tables(filter(None, recordings))))

    def interrupted(self) -> list[str]:
        """Return the rollouts that never ended because their engine died."""
        return sorted(each.rollout_id for each in self.running() if not each.is_running)

    def is_begun(self, rollout_id: str) -> bool:
        """Return whether a rollout has a journal here, or has ended; the leftovers of a killed beginning are removed.

        An interrupted rollout for which this is false ran nothing, and may begin again under its ID.
        """
        if not self._folder(rollout_id).is_dir():
            return False
        if is_locked(self._marks / rollout_id) or has_records(self.captures / rollout_id):
            return True
        if stored_outcome(self, rollout_id) is not None:
            return True
        self._forget(rollout_id)
        return False

    def task(self, rollout_id: str) -> Task:
        """Return the task of a rollout, also of an interrupted one.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            return Task.model_validate_json(self._opening(rollout_id)[1], context=AS_STORED)
        except (StoreError, ValueError) as exc:
            if (record := stored_record(self, rollout_id)) is not None:  # without an engine, it may have no journal
                return record.task
            raise StoreError(f"The task of rollout '{rollout_id}' cannot be read: {exc}") from exc

    def rebuild(self) -> None:
        """Rebuild the index from the shards."""
        self._index.rebuild()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        self._index.close()
        for rollout_id in list(self._running):
            self.release(rollout_id)

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _folder(self, rollout_id: str) -> Path:
        if not rollout_id or rollout_id.startswith(".") or "/" in rollout_id or "\0" in rollout_id:
            raise StoreError(f"'{rollout_id}' is no id of a rollout")
        return self._rollouts / rollout_id

    def _append(self, kind: Kind, outcome: Outcome, task: Task, *, verdict: str = FIRST, sequence: int = 0) -> Record:
        record = Record(
            record_id=secrets.token_hex(8),
            rollout_id=outcome.rollout_id,
            kind=kind,
            verdict=verdict,
            sequence=sequence,
            stored_at=time.time(),
            outcome=outcome,
            task=task,
        )
        self._writer.append({"format": _FORMAT, **record.model_dump(mode="json")})
        return record

    def _unmark(self, rollout_id: str) -> None:
        (self._marks / rollout_id).unlink(missing_ok=True)
        self.release(rollout_id)


def stored_record(store: RolloutStore, rollout_id: str) -> Record | None:
    """Return the first record of the rollout with this whole ID; None if it has none yet."""
    with contextlib.suppress(StoreError):
        record = store.get(rollout_id)
        return record if record.rollout_id == rollout_id else None
    return None


def stored_outcome(store: RolloutStore, rollout_id: str) -> Outcome | None:
    """Return the outcome of a rollout with this whole ID; None if it has none yet."""
    record = stored_record(store, rollout_id)
    return None if record is None else record.outcome


def check_verdict_name(name: str) -> None:
    """Check that a verdict can have this name.

    Raises:
        StoreError: the name is reserved, or has other characters than a name may have.
    """
    if name in (FIRST, LAST) or not _NAME.fullmatch(name):
        raise StoreError(
            f"A verdict cannot be called {name!r}: letters, digits, '.', '_' and '-' can, '{FIRST}' and '{LAST}' not"
        )


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing; after the block, its content is on the disk."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    if source == target:  # already written here during the rollout
        sync_path(source)
        return
    draft = target.with_name(f".{target.name}")
    with source.open("rb") as original, _synced(draft) as file:
        shutil.copyfileobj(original, file, _BLOCK)
    draft.rename(target)


@contextlib.contextmanager
def _as_store_error(what: str, outcome: Outcome | None = None) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except CaptureError as exc:
        raise StoreError(f"The rollout could not be {what}: {exc}", outcome=outcome) from exc
    except OSError as exc:
        why = "the disk is full" if exc.errno in _DISK_FULL else str(exc)
        raise StoreError(f"The rollout could not be {what}: {why}", outcome=outcome) from exc
