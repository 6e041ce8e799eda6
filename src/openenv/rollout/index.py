"""The index of a store: an SQLite file that can be deleted at any time, because the shards say it all.

Knows SQL and shards. A shard is read on from where it was read to; its rows and that mark change together.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv.rollout.shards import Place, read_lines

logger = logging.getLogger(__name__)

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    record_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, kind TEXT NOT NULL, stored_at REAL NOT NULL,
    task_id TEXT, status TEXT, phase TEXT, reason TEXT, reward REAL, agent TEXT, model TEXT, sandbox TEXT,
    turns INTEGER, started_at REAL, wall_s REAL,
    shard TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_rollout ON records (rollout_id, stored_at);
CREATE INDEX IF NOT EXISTS by_time ON records (stored_at);
"""
_COLUMNS = (
    "record_id, rollout_id, kind, stored_at, task_id, status, phase, reason, reward, agent, model, sandbox, turns, "
    "started_at, wall_s, shard, offset, length"
)
_FILTERS = frozenset({"rollout_id", "task_id", "status", "agent", "model", "sandbox", "kind"})


@dataclass(frozen=True, slots=True)
class Row:
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
    agent: str
    model: str
    sandbox: str
    turns: int
    started_at: float
    wall_s: float
    place: Place


class Index:
    """Finds records. Safe from many threads and processes; a broken file is made anew."""

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
                logger.warning("the index %s is made anew: %s", self._path, exc)
                self._forget(in_memory=isinstance(exc, sqlite3.OperationalError))
                self._sync(None)

    def rebuild(self) -> None:
        """Delete the index and read every shard again."""
        with self._lock:
            self._forget(in_memory=False)
            self._sync(None)

    def find(self, *, limit: int | None = None, latest: bool = False, **equal: str | None) -> list[Row]:
        """Return records, newest first.

        Args:
            limit: At most so many.
            latest: Only the newest record of each rollout.
            equal: Columns and the value each must have; None is no condition.
        """
        unknown = set(equal) - _FILTERS
        if unknown:
            raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
        given = {name: value for name, value in equal.items() if value is not None}
        conditions = [f"{name} = ?" for name in given]
        if latest:
            conditions.append(
                "NOT EXISTS (SELECT 1 FROM records AS later WHERE later.rollout_id = records.rollout_id "
                "AND (later.stored_at, later.record_id) > (records.stored_at, records.record_id))"
            )
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        query = f"SELECT {_COLUMNS} FROM records{where} ORDER BY stored_at DESC, record_id DESC"
        values: list[object] = list(given.values())
        if limit is not None:
            query += " LIMIT ?"
            values.append(limit)
        return [_row(values) for values in self._read(query, values)]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _read(self, query: str, values: Sequence[object]) -> list[Any]:
        with self._lock:
            return self._open().execute(query, values).fetchall()

    def _open(self, path: str | None = None) -> sqlite3.Connection:
        if self._db is None:
            self._db = sqlite3.connect(path or self._path, timeout=30, isolation_level=None, check_same_thread=False)
            with contextlib.suppress(sqlite3.OperationalError):  # not on every file system
                self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if self._db.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
                self._db.executescript("DROP TABLE IF EXISTS records; DROP TABLE IF EXISTS shards;")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_VERSION}")
        return self._db

    def _forget(self, *, in_memory: bool) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if in_memory:  # the disk is full or read-only: this process indexes for itself
            self._open(":memory:")
            return
        for path in (
            self._path,
            *(self._path.with_name(self._path.name + end) for end in ("-wal", "-shm", "-journal")),
        ):
            path.unlink(missing_ok=True)

    def _sync(self, shard: str | None) -> None:
        db = self._open()
        names = {path.name for path in self._shards.glob("*.jsonl")} if shard is None else {shard}
        with _transaction(db):
            known = dict(db.execute("SELECT name, bytes FROM shards").fetchall())
            if shard is None:
                for gone in known.keys() - names:
                    self._drop(db, gone)
            for name in sorted(names):
                self._sync_shard(db, name, known.get(name, 0))

    def _sync_shard(self, db: sqlite3.Connection, name: str, done: int) -> None:
        path = self._shards / name
        size = path.stat().st_size
        if size < done:  # not the file that was read before
            self._drop(db, name)
            done = 0
        if size == done:
            return
        for place, record in read_lines(path, done):
            done = place.offset + place.length
            values = None if record is None else _values(record, place)
            if values is not None:
                marks = ", ".join("?" * len(values))
                db.execute(f"INSERT OR IGNORE INTO records ({_COLUMNS}) VALUES ({marks})", values)
        db.execute("INSERT OR REPLACE INTO shards (name, bytes) VALUES (?, ?)", (name, done))

    def _drop(self, db: sqlite3.Connection, name: str) -> None:
        db.execute("DELETE FROM records WHERE shard = ?", (name,))
        db.execute("DELETE FROM shards WHERE name = ?", (name,))


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _values(record: dict[str, Any], place: Place) -> tuple[object, ...] | None:
    outcome = record.get("outcome")
    try:
        if not isinstance(outcome, dict):
            raise TypeError("no outcome")
        plain = ("task_id", "status", "phase", "reason", "reward", "agent", "model", "sandbox")
        return (
            *(str(record[key]) for key in ("record_id", "rollout_id", "kind")),
            float(record["stored_at"]),
            *(outcome.get(key) for key in plain),
            len(outcome.get("turns") or ()),
            *(float(outcome.get(key) or 0.0) for key in ("started_at", "wall_s")),
            *(place.shard, place.offset, place.length),
        )
    except (KeyError, TypeError, ValueError):
        logger.warning("a line of %s is no record and is left out", place.shard)
        return None


def _row(values: tuple[Any, ...]) -> Row:
    return Row(*(*values[:-3], Place(*values[-3:])))
