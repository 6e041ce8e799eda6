"""The store of rollouts: append-only shards, an index, and each rollout's task, work tree and model calls.

A rollout is stored when its line is in a shard; files are put in place before that. Nothing that was stored is ever
changed: verifying again appends another record. Any number of processes may write to one store.
"""

# rollouts/                                     a store
#   shards/20261116T041300-812-9f3c2a1b.jsonl   one file per writing process, one record per line, only appended to:
#                                                 {"format":1,"record_id":"5e0c","rollout_id":"a41f","kind":"rollout",
#                                                  "stored_at":1794802380.1,"outcome":{...},"task":{...}}
#   index.sqlite                                where each record is, and what `find` filters by; can be deleted
#   rollouts/a41f.../task.json                  written when the rollout begins
#                    .running                   locked while it runs; a folder without a record whose lock is free was
#                                               interrupted
#                    worktree.tar, baseline.tar, agent.log
#   captures/a41f.../                           the recorded model calls
#
# The order of writing makes a crash harmless: files first (under a hidden name, then renamed), then the line with
# fsync, then the index. A line counts once its newline is there, so a line that a crash tore off is never read.

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from openenv.errors import CaptureError, RolloutError, StoreError
from openenv.rollout.outcome import Outcome
from openenv.rollout.scratch import is_locked, open_locked
from openenv.rollout.task import Task
from openenv.rollout.trust import TRUSTS, Trust, reaches

if TYPE_CHECKING:
    from openenv.rollout.capture.records import Recording


logger = logging.getLogger(__name__)

Kind = Literal["rollout", "reverify"]
Format = Literal["jsonl", "parquet"]
_FORMAT = 1
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLOCK = 1024 * 1024


class ShardWriter:
    """Appends lines to a shard of its own, made with the first line; safe from many threads and after a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._path = folder
        self._owner = 0

    def append(self, record: dict[str, Any]) -> str:
        """Write a line, wait until it is on the disk, and return the shard's name.

        Raises:
            OSError: it could not be written; nothing of it remains.
        """
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            handle = self._open()
            # Not a buffered file: after an error its buffer would still hold a part of the line, and write it later.
            offset = os.lseek(handle, 0, os.SEEK_END)
            try:
                _write_all(handle, line)
                os.fsync(handle)
            except OSError:
                self._truncate(handle, offset)
                raise
            return self._path.name

    def close(self) -> None:
        """Close the file; a later line begins another shard."""
        with self._lock:
            self._drop()

    def _open(self) -> int:
        if self._handle is not None and self._owner != os.getpid():
            self._drop()  # the parent process goes on writing to the old one
        if self._handle is None:
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            self._path = self._folder / f"{stamp}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
            self._handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._owner = os.getpid()
        return self._handle

    def _truncate(self, handle: int, offset: int) -> None:
        try:
            os.ftruncate(handle, offset)
        except OSError:
            logger.warning("a torn line stays in %s", self._path)
            self._drop()  # a line appended to the torn one would be lost with it

    def _drop(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


_INDEX_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    record_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, kind TEXT NOT NULL, stored_at REAL NOT NULL,
    task_id TEXT, status TEXT, phase TEXT, reason TEXT, reward REAL, trust TEXT, agent TEXT, model TEXT, sandbox TEXT,
    turns INTEGER, started_at REAL, wall_s REAL,
    shard TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_rollout ON records (rollout_id, stored_at);
CREATE INDEX IF NOT EXISTS by_time ON records (stored_at);
"""
_FILTERS = frozenset({"rollout_id", "task_id", "status", "trust", "agent", "model", "sandbox", "kind"})


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One record as the index knows it."""

    record_id: str
    rollout_id: str
    kind: str
    stored_at: float
    task_id: str
    status: str
    phase: str
    reason: str | None
    reward: float | None
    trust: Trust | None
    agent: str
    model: str
    sandbox: str
    turns: int
    started_at: float
    wall_s: float
    shard: str
    offset: int
    length: int


_COLUMNS = ", ".join(column.name for column in fields(RolloutRow))


class RolloutIndex:
    """Finds records. Safe from many threads and processes; rebuilt from the shards when the file is broken.

    Each shard is read on from where it was read to; its rows and that position change in one transaction.
    """

    def __init__(self, path: Path, shards: Path) -> None:
        self._path, self._shards = path, shards
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None

    def sync(self, shard: str | None = None) -> None:
        """Read what was appended since the last time, of one shard or of all."""
        with self._lock:
            try:
                self._sync(shard)
            except sqlite3.DatabaseError as exc:
                logger.warning("the index %s is rebuilt: %s", self._path, exc)
                self._forget(in_memory=isinstance(exc, sqlite3.OperationalError))
                self._sync(None)

    def rebuild(self) -> None:
        """Delete the index and read every shard again."""
        with self._lock:
            self._forget(in_memory=False)
            self._sync(None)

    def find(
        self,
        *,
        limit: int | None = None,
        latest: bool = False,
        min_trust: Trust | None = None,
        **equal: str | None,
    ) -> list[RolloutRow]:
        """Return records, newest first.

        Args:
            limit: At most so many.
            latest: Only the newest record of each rollout.
            min_trust: Only those whose reward can be trusted so far; records of before trust was stored cannot.
            equal: Columns and the value each must have; None is no condition.
        """
        unknown = set(equal) - _FILTERS
        if unknown:
            raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
        filters = {name: value for name, value in equal.items() if value is not None}
        conditions = [f"{name} = ?" for name in filters]
        values: list[object] = list(filters.values())
        if min_trust is not None:
            enough = [trust for trust in TRUSTS if reaches(trust, min_trust)]
            conditions.append(f"trust IN ({', '.join('?' * len(enough))})")
            values += enough
        if latest:
            # By id where the times are equal: a verification can follow within one tick of the clock.
            conditions.append(
                "NOT EXISTS (SELECT 1 FROM records AS later WHERE later.rollout_id = records.rollout_id "
                "AND (later.stored_at, later.record_id) > (records.stored_at, records.record_id))"
            )
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        query = f"SELECT {_COLUMNS} FROM records{where} ORDER BY stored_at DESC, record_id DESC"
        if limit is not None:
            query += " LIMIT ?"
            values.append(limit)
        with self._lock:
            rows = self._open().execute(query, values).fetchall()
        return [RolloutRow(*row) for row in rows]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _open(self, path: str | None = None) -> sqlite3.Connection:
        if self._db is None:
            self._db = sqlite3.connect(path or self._path, timeout=30, isolation_level=None, check_same_thread=False)
            with contextlib.suppress(sqlite3.OperationalError):  # not on every file system
                self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if self._db.execute("PRAGMA user_version").fetchone()[0] not in (0, _INDEX_VERSION):
                self._db.executescript("DROP TABLE IF EXISTS records; DROP TABLE IF EXISTS shards;")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_INDEX_VERSION}")
        return self._db

    def _forget(self, *, in_memory: bool) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        # An OperationalError is about the disk (full, read-only, locked for too long), not about the file's content:
        # the file may serve others, so it stays, and this process indexes for itself.
        if in_memory:
            self._open(":memory:")
            return
        for suffix in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _sync(self, shard: str | None) -> None:
        db = self._open()
        names = {path.name for path in self._shards.glob("*.jsonl")} if shard is None else {shard}
        with db:  # commits, or rolls back when an exception leaves the block
            # Immediate: the write lock comes before the positions are read, or two processes would read the same
            # lines of a shard.
            db.execute("BEGIN IMMEDIATE")
            known = dict(db.execute("SELECT name, bytes FROM shards").fetchall())
            if shard is None:
                for gone in known.keys() - names:
                    self._drop(db, gone)
            for name in sorted(names):
                self._sync_shard(db, name, known.get(name, 0))

    def _sync_shard(self, db: sqlite3.Connection, name: str, done: int) -> None:
        path = self._shards / name
        size = path.stat().st_size
        if size < done:  # another file under the same name
            self._drop(db, name)
            done = 0
        if size == done:
            return
        with path.open("rb") as file:
            file.seek(done)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                values = _values(line, name, done)
                if values is not None:
                    marks = ", ".join("?" * len(values))
                    # A shard that was copied beside itself has the same records twice.
                    db.execute(f"INSERT OR IGNORE INTO records ({_COLUMNS}) VALUES ({marks})", values)
                done += len(line)
        db.execute("INSERT OR REPLACE INTO shards (name, bytes) VALUES (?, ?)", (name, done))

    def _drop(self, db: sqlite3.Connection, name: str) -> None:
        db.execute("DELETE FROM records WHERE shard = ?", (name,))
        db.execute("DELETE FROM shards WHERE name = ?", (name,))


def _values(line: bytes, shard: str, offset: int) -> tuple[object, ...] | None:
    """Return the columns of a line, or None for a line that is no record."""
    plain = ("task_id", "status", "phase", "reason", "reward", "trust", "agent", "model", "sandbox")
    try:
        record = json.loads(line)
        outcome = record["outcome"]
        return (
            *(str(record[key]) for key in ("record_id", "rollout_id", "kind")),
            float(record["stored_at"]),
            *(outcome.get(key) for key in plain),
            len(outcome.get("turns") or ()),
            *(float(outcome.get(key) or 0.0) for key in ("started_at", "wall_s")),
            *(shard, offset, len(line)),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        logger.warning("a line of %s is no record and is left out", shard)
        return None


class Record(BaseModel):
    """One stored line: a rollout, or a later verification of it."""

    model_config = ConfigDict(frozen=True)

    record_id: str
    rollout_id: str
    kind: Kind
    stored_at: float
    outcome: Outcome
    task: Task
    """The task as it was verified in this record."""


class RolloutStore:
    """A folder of rollouts; a context manager, usable from any thread.

    Args:
        root: The folder.
        create: Whether to make it when it is not there.

    Raises:
        StoreError: it cannot be made, or is not there.
    """

    def __init__(self, root: str | Path, *, create: bool = True) -> None:
        self.root = Path(root)
        self._shards = self.root / "shards"
        self._rollouts = self.root / "rollouts"
        self.captures = self.root / "captures"
        """The folder of the recorded model calls."""
        if not create and not self._shards.is_dir():
            what = "is no store of rollouts" if self.root.exists() else "does not exist"
            raise StoreError(f"There are no rollouts in {self.root}: it {what}")
        with _as_store_error("opened"):
            for folder in (self._shards, self._rollouts, self.captures):
                folder.mkdir(parents=True, exist_ok=True)
        self._writer = ShardWriter(self._shards)
        self._index = RolloutIndex(self.root / "index.sqlite", self._shards)
        self._running: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, rollout_id: str, task: Task) -> None:
        """Mark a rollout as running, so that one which is never stored shows up as interrupted.

        Raises:
            StoreError: there is such a rollout already, or the disk is full.
        """
        folder = self._folder(rollout_id)
        try:
            with _as_store_error("begun"):
                folder.mkdir()  # fails where the id is in use, in this process or in another one
                try:
                    with self._lock:
                        self._running[rollout_id] = open_locked(folder / ".running")
                    with _synced(folder / "task.json") as file:
                        file.write(task.model_dump_json().encode())
                except OSError:
                    self._unmark(rollout_id)
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
        except FileExistsError:
            raise StoreError(f"There is a rollout '{rollout_id}' already") from None

    def add(
        self,
        outcome: Outcome,
        task: Task,
        *,
        worktree: Path | None = None,
        baseline: Path | None = None,
        agent_log: Path | None = None,
    ) -> Record:
        """Store an outcome with copies of the rollout's files; those that do not exist are left out.

        Raises:
            StoreError: the disk is full, or the rollout was stored before; nothing of it is listed.
        """
        rollout_id = outcome.rollout_id
        if rollout_id not in self._running:  # an outcome that no engine of this process began
            self.begin(rollout_id, task)
        folder = self._folder(rollout_id)
        sources = {"worktree.tar": worktree, "baseline.tar": baseline, "agent.log": agent_log}
        try:
            with _as_store_error("stored", outcome):
                for name, source in sources.items():
                    if source is not None and source.exists():
                        _copy(source, folder / name)
                return self._append("rollout", outcome, task)
        except StoreError:
            # Without a record the folder would count as an interrupted rollout, which it is not: it ended.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self._unmark(rollout_id)

    def keep_capture(self, rollout_id: str, records: Path) -> None:
        """Copy the records of a rollout's model calls, unless they were written here.

        Raises:
            StoreError: the disk is full.
        """
        place = self.captures / rollout_id
        with _as_store_error("stored"):
            if records.resolve() != place.resolve() and records.is_dir():
                draft = place.with_name(f".{rollout_id}")
                shutil.copytree(records, draft, dirs_exist_ok=True)
                draft.rename(place)

    def add_verification(self, outcome: Outcome, task: Task) -> Record:
        """Append another verification of a stored rollout; the earlier records stay.

        Raises:
            StoreError: there is no such rollout, or the disk is full.
        """
        self.get(outcome.rollout_id)
        with _as_store_error("stored", outcome):
            return self._append("reverify", outcome, task)

    def get(self, rollout_id: str, *, record_id: str | None = None) -> Record:
        """Return a rollout's newest record, or a certain one; the beginning of an id is enough when no other begins so.

        Raises:
            StoreError: there is no such record.
        """
        for record in self.history(rollout_id):
            if record_id is None or record.record_id == record_id:
                return record
        raise StoreError(f"The rollout '{rollout_id}' has no record '{record_id}'")

    def history(self, rollout_id: str) -> list[Record]:
        """Return all records of a rollout, newest first.

        Raises:
            StoreError: there is no such rollout.
        """
        return [self.read(row) for row in self._index.find(rollout_id=self.resolve(rollout_id))]

    def resolve(self, rollout_id: str) -> str:
        """Return the whole id of a rollout from its beginning.

        Raises:
            StoreError: none or several begin so.
        """
        self._index.sync()
        if self._index.find(rollout_id=rollout_id, limit=1):
            return rollout_id
        ids = {row.rollout_id for row in self._index.find() if rollout_id and row.rollout_id.startswith(rollout_id)}
        if len(ids) == 1:
            return ids.pop()
        how = "There is no rollout" if not ids else "There are several rollouts that begin with"
        raise StoreError(f"{how} '{rollout_id}' in {self.root}")

    def find(
        self,
        *,
        limit: int | None = None,
        latest: bool = True,
        min_trust: Trust | None = None,
        **equal: str | None,
    ) -> list[RolloutRow]:
        """Return rows of the index, newest first; by default the newest record of each rollout.

        Args:
            limit: At most so many.
            latest: False for every record, verified again or not.
            min_trust: Only those whose reward can be trusted so far; records of before trust was stored cannot.
            equal: `task_id`, `status`, `trust`, `agent`, `model`, `sandbox`, `kind` or `rollout_id` and its value.
        """
        self._index.sync()
        return self._index.find(limit=limit, latest=latest, min_trust=min_trust, **equal)

    def read(self, row: RolloutRow) -> Record:
        """Return the record of a row.

        Raises:
            StoreError: it is gone.
        """
        try:
            with (self._shards / row.shard).open("rb") as file:
                file.seek(row.offset)
                return Record.model_validate(json.loads(file.read(row.length)))
        except (OSError, ValueError) as exc:
            raise StoreError(f"The record of rollout '{row.rollout_id}' cannot be read: {exc}") from exc

    def records(
        self, *, limit: int | None = None, min_trust: Trust | None = None, **equal: str | None
    ) -> Iterator[Record]:
        """Yield the newest record of each rollout, oldest first; the arguments are those of `find`."""
        for row in reversed(self.find(limit=limit, latest=True, min_trust=min_trust, **equal)):
            yield self.read(row)

    def file(self, rollout_id: str, name: str) -> Path | None:
        """Return a file that was kept with a rollout (`worktree.tar`, `baseline.tar`, `agent.log`), or None."""
        path = self._folder(self.resolve(rollout_id)) / name
        return path if path.is_file() else None

    def interrupted(self) -> list[str]:
        """Return the rollouts that began and never ended, because their engine died."""
        self._index.sync()
        stored = {row.rollout_id for row in self._index.find(kind="rollout")}
        names = sorted(path.name for path in self._rollouts.iterdir() if path.is_dir())
        return [name for name in names if name not in stored and not is_locked(self._rollouts / name / ".running")]

    def rebuild(self) -> None:
        """Rebuild the index from the shards."""
        self._index.rebuild()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        self._index.close()
        for rollout_id in list(self._running):
            self._unmark(rollout_id)

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _folder(self, rollout_id: str) -> Path:
        if not rollout_id or rollout_id.startswith(".") or "/" in rollout_id or "\0" in rollout_id:
            raise StoreError(f"'{rollout_id}' is no id of a rollout")
        return self._rollouts / rollout_id

    def _append(self, kind: Kind, outcome: Outcome, task: Task) -> Record:
        record = Record(
            record_id=secrets.token_hex(8),
            rollout_id=outcome.rollout_id,
            kind=kind,
            stored_at=time.time(),
            outcome=outcome,
            task=task,
        )
        self._index.sync(self._writer.append({"format": _FORMAT, **record.model_dump(mode="json")}))
        return record

    def _unmark(self, rollout_id: str) -> None:
        with self._lock:
            handle = self._running.pop(rollout_id, None)
        if handle is not None:
            (self._rollouts / rollout_id / ".running").unlink(missing_ok=True)
            os.close(handle)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write; after the block its content is on the disk."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
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
    except OSError as exc:
        why = "the disk is full" if exc.errno in _DISK_FULL else str(exc)
        raise StoreError(f"The rollout could not be {what}: {why}", outcome=outcome) from exc


def export_rollouts(
    store: RolloutStore,
    target: str | Path,
    *,
    kind: Format | None = None,
    messages: bool = False,
    status: str | None = None,
    task_id: str | None = None,
    agent: str | None = None,
    min_trust: Trust | None = None,
) -> int:
    """Write stored rollouts, each as its newest record has it, into a file; return how many lines or rows.

    Args:
        store: What to export.
        target: The file.
        kind: `jsonl` (a rollout per line: outcome, turns and sequences) or `parquet` (a training sequence per row, the
            reward and its trust in the metadata); by default what the file's name ends in.
        messages: Write the requests and responses in full, too (`jsonl`).
        status, task_id, agent: Only such rollouts.
        min_trust: Only those whose reward can be trusted so far.

    Raises:
        StoreError: a record cannot be read, or the file cannot be written.
        RolloutError: the file is Parquet and pyarrow is not installed.
    """
    target = Path(target)
    records = store.records(status=status, task_id=task_id, agent=agent, min_trust=min_trust)
    try:
        if (kind or ("parquet" if target.suffix == ".parquet" else "jsonl")) == "parquet":
            from openenv.rollout.capture.export import write_parquet  # the capture proxy's part is not always needed

            try:
                return write_parquet(target, filter(None, (recording(store, record) for record in records)))
            except ImportError as exc:
                raise RolloutError(str(exc)) from exc
        return _write_jsonl(store, records, target, messages=messages)
    except OSError as exc:
        raise StoreError(f"{target} cannot be written: {exc}") from exc


def recording(store: RolloutStore, record: Record) -> Recording | None:
    """Return the captured model calls of a rollout, or None when it made none."""
    from openenv.rollout.capture.records import read

    folder = store.captures / record.rollout_id
    if not folder.is_dir():
        return None
    try:
        captured = read(folder)
    except CaptureError as exc:
        raise StoreError(f"The model calls of rollout '{record.rollout_id}' cannot be read: {exc}") from exc
    outcome = record.outcome
    about = ("task_id", "status", "reward", "trust", "agent")
    captured.metadata = {**captured.metadata, **{name: getattr(outcome, name) for name in about}}
    return captured


def _write_jsonl(store: RolloutStore, records: Iterator[Record], target: Path, *, messages: bool) -> int:
    from openenv.rollout.capture.export import document

    count = 0
    with target.open("w", encoding="utf-8") as file:
        for record in records:
            captured = recording(store, record)
            calls = None if captured is None else document(captured, include_messages=messages)
            line = {**record.model_dump(mode="json"), "capture": calls}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count
