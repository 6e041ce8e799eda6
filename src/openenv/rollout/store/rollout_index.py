"""The index of a store in SQLite: one row per record, filters, and statistics.

Knows shards and SQLite, but not the files of rollouts. It can be deleted, because it is rebuilt from the shards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, get_args

from openenv.errors import StoreError
from openenv.rollout.store.outcome import group_of, sequence_of
from openenv.rollout.tasks.task import TRUSTS, Trust, reaches

logger = logging.getLogger(__name__)

_DAMAGE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""The errors of a damaged index: of its pages, and of the texts in them."""

FIRST = "first"
"""The verdict at the end of the rollout."""
LAST = "last"
"""Its newest verdict."""
PASS = 1.0
"""The smallest reward with which a rollout counts as passed."""

Order = Literal["newest", "oldest", "reward", "turns", "tokens", "wall_s"]
"""`reward`, `turns`, `tokens` and `wall_s` list the largest first."""
Grouping = Literal[
    "task_id", "group", "agent", "model", "status", "trust", "sandbox", "verdict", "environment", "policy_version"
]
GROUPINGS: tuple[str, ...] = get_args(Grouping)

_VERSION = 7
_KEPT = 64
_MOST_INSTRUCTION = 300  # characters; lists show a line of it
_SCHEMA = """
CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    record_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, kind TEXT NOT NULL, verdict TEXT NOT NULL,
    sequence INTEGER NOT NULL, stored_at REAL NOT NULL, task_id TEXT NOT NULL, "group" TEXT NOT NULL,
    status TEXT NOT NULL, phase TEXT NOT NULL, reason TEXT, reward REAL, trust TEXT, agent TEXT NOT NULL,
    model TEXT NOT NULL, sandbox TEXT NOT NULL, environment TEXT NOT NULL, policy_version TEXT NOT NULL,
    parent TEXT NOT NULL, parent_call INTEGER,
    instruction TEXT NOT NULL, turns INTEGER NOT NULL, tokens INTEGER NOT NULL,
    started_at REAL NOT NULL, wall_s REAL NOT NULL,
    shard TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    is_last INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX IF NOT EXISTS by_rollout ON records (rollout_id, sequence, stored_at, record_id);
CREATE INDEX IF NOT EXISTS by_verdict ON records (verdict, stored_at, record_id) WHERE kind != 'rollout';
CREATE INDEX IF NOT EXISTS by_parent ON records (parent) WHERE parent != '';
CREATE INDEX IF NOT EXISTS by_reward ON records (reward, stored_at, record_id) WHERE kind = 'rollout';
-- These two hold all that lists select, order and count by: the rows themselves are not read but for those shown.
CREATE INDEX IF NOT EXISTS of_first ON records (
    stored_at, record_id, task_id, status, reward, agent, model, "group", trust, sandbox, environment, policy_version,
    turns, tokens, wall_s, kind
) WHERE kind = 'rollout';
CREATE INDEX IF NOT EXISTS of_last ON records (
    stored_at, record_id, task_id, status, reward, agent, model, "group", trust, sandbox, environment, policy_version,
    turns, tokens, wall_s, is_last
) WHERE is_last = 1;
"""
_LATER = """
SELECT 1 FROM records AS later WHERE later.rollout_id = records.rollout_id
AND (later.sequence, later.stored_at, later.record_id) > (records.sequence, records.stored_at, records.record_id)
"""
# Times order only lists of rollouts. By ID if they are equal: two records can follow within one tick of the clock.
_ORDERS: Mapping[str, str] = {
    "newest": "stored_at DESC, record_id DESC",
    "oldest": "stored_at, record_id",
    **{name: f"{name} DESC, stored_at DESC, record_id DESC" for name in ("reward", "turns", "tokens", "wall_s")},
}
_EQUAL = (
    *("rollout_id", "task_id", "group", "status", "trust", "agent", "model", "sandbox", "kind"),
    *("environment", "policy_version", "parent"),
)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """The columns of one record."""

    record_id: str
    rollout_id: str
    kind: str
    verdict: str
    """`first` for the rollout itself, else the name of the later verdict."""
    sequence: int
    """The number of the verdict: 0 for the rollout itself."""
    stored_at: float
    task_id: str
    group: str
    status: str
    phase: str
    reason: str | None
    reward: float | None
    trust: Trust | None
    agent: str
    model: str
    sandbox: str
    environment: str
    """The name of the environment that was played; empty for tasks of coding agents without one."""
    policy_version: str
    """The version of the trained policy at the start; empty if nothing was trained."""
    parent: str
    """The rollout that this one branches from; empty for others."""
    parent_call: int | None
    """The last call that both share."""
    instruction: str
    """The start of the task's instruction."""
    turns: int
    tokens: int
    """The number of sampled tokens."""
    started_at: float
    wall_s: float
    shard: str
    offset: int
    length: int


_NAMES = [column.name for column in fields(RolloutRow)]
_COLUMNS = ", ".join(f'"{name}"' for name in _NAMES)
_VALUES = attrgetter(*_NAMES)
_INSERT = f"INSERT OR IGNORE INTO records ({_COLUMNS}) VALUES ({', '.join('?' * len(_NAMES))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Conditions on records. None means no condition; of several values, one must match."""

    rollout_id: str | Collection[str] | None = None
    task_id: str | Collection[str] | None = None
    group: str | Collection[str] | None = None
    status: str | Collection[str] | None = None
    trust: str | Collection[str] | None = None
    agent: str | Collection[str] | None = None
    model: str | Collection[str] | None = None
    sandbox: str | Collection[str] | None = None
    kind: str | Collection[str] | None = None
    environment: str | Collection[str] | None = None
    policy_version: str | Collection[str] | None = None
    parent: str | Collection[str] | None = None
    """The rollout that they branch from."""
    min_trust: Trust | None = None
    """The lowest trust level of the reward. Old records without a trust level never match."""
    min_reward: float | None = None
    max_reward: float | None = None
    since: float | None = None
    """Stored at this time or later, in seconds since 1970."""
    until: float | None = None
    """Stored before this time."""
    text: str | None = None
    """A part of the ID, the task, its instruction, the group or the reason, in upper or lower case."""
    verdict: str | None = FIRST
    """The verdict that counts: `first`, `last`, or the name of a later one, which excludes rollouts without it. None
    lists all verdicts as separate records."""

    def having(self, conditions: Mapping[str, Any]) -> RolloutFilter:
        """Return a filter with further conditions.

        Raises:
            ValueError: a condition does not exist.
        """
        unknown = set(conditions) - {field.name for field in fields(self)}
        if unknown:
            raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
        return replace(self, **conditions)

    def sql(self) -> tuple[str, list[object]]:
        """Return the WHERE clause, which may be empty, and its values."""
        conditions: list[str] = []
        values: list[object] = []

        def add(condition: str, *more: object) -> None:
            conditions.append(condition)
            values.extend(more)

        for name in _EQUAL:
            value: str | Collection[str] | None = getattr(self, name)
            if value is not None:
                choices = [value] if isinstance(value, str) else list(value)
                add(f'"{name}" IN ({", ".join("?" * len(choices))})', *choices)
        if self.min_trust is not None:
            enough = [trust for trust in TRUSTS if reaches(trust, self.min_trust)]
            add(f"trust IN ({', '.join('?' * len(enough))})", *enough)
        limits = (("reward >= ?", self.min_reward), ("reward <= ?", self.max_reward))
        times = (("stored_at >= ?", self.since), ("stored_at < ?", self.until))
        for condition, limit in (*limits, *times):
            if limit is not None:
                add(condition, limit)
        if self.text:
            pattern = "%" + "".join(f"\\{c}" if c in "%_\\" else c for c in self.text) + "%"
            places = ("rollout_id", "task_id", '"group"', "reason", "instruction")
            add(f"({' OR '.join(f'{place} LIKE ? ESCAPE {_BACKSLASH}' for place in places)})", *[pattern] * len(places))
        if self.verdict == FIRST:
            add("kind = 'rollout'")
        elif self.verdict == LAST:
            add("is_last = 1")
        elif self.verdict is not None:
            add("verdict = ?", self.verdict)
        return (f" WHERE {' AND '.join(conditions)}" if conditions else ""), values


_CURVE_POINTS = 40
_BACKSLASH = "'\\'"
EVERY_RECORD = RolloutFilter(verdict=None)


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Statistics of the rollouts of one task, group, agent or model."""

    name: str
    rollouts: int
    scored: int
    """The number of rollouts with a reward; the statistics of rewards cover these."""
    passed: int
    """The number with a reward of 1 or more."""
    mean: float | None
    deviation: float | None
    """The standard deviation of the rewards; None for fewer than two."""
    lowest: float | None
    highest: float | None
    turns: float
    """A mean, like the next two."""
    tokens: float
    wall_s: float
    newest: float
    """The time at which the last one was stored."""

    @property
    def pass_rate(self) -> float | None:
        """The share of passed rollouts among the rollouts with a reward."""
        return self.passed / self.scored if self.scored else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the pass rate (Wilson score)."""
        return wilson(self.passed, self.scored) if self.scored else None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The rewards of one line of a learning curve within one interval of time, or of one version of the policy."""

    name: str
    at: float | str
    """The middle of the interval, in seconds since 1970, or the version."""
    scored: int
    passed: int
    mean: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the pass rate (Wilson score)."""
        return wilson(self.passed, self.scored)


def wilson(passed: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the Wilson score interval (95 %). Unlike the normal one, it holds for few samples and shares of 0 or 1."""
    share, square = passed / count, z * z
    middle = share + square / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    scale = 1 + square / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


class RolloutIndex:
    """Finds records. Safe from many threads and processes; a broken file is rebuilt from the shards.

    Each shard has a read position. New rows and the new position are written in one transaction.
    """

    def __init__(self, path: Path, shards: Path) -> None:
        self._path, self._shards = path, shards
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._in_memory = False
        self._figures_lock = threading.Lock()
        self._figures_db: sqlite3.Connection | None = None
        self._kept: dict[tuple[object, ...], list[Any]] = {}
        self._seen: dict[str, int] | None = None  # the sizes of all shards at the last read

    def sync(self) -> None:
        """Read the new records of all shards. Readers call it; writers only append to their shards."""
        with self._lock:
            try:
                self._sync()
            except _DAMAGE as exc:
                logger.warning("the index %s is rebuilt: %s", self._path, exc)
                self._forget(in_memory=isinstance(exc, sqlite3.OperationalError))
                self._sync()

    def rebuild(self) -> None:
        """Delete the index and read every shard again."""
        with self._lock:
            self._forget(in_memory=False)
            self._sync()

    def find(
        self, where: RolloutFilter, *, order: Order = "newest", limit: int | None = None, offset: int = 0
    ) -> list[RolloutRow]:
        """Return rows."""
        clause, values = where.sql()
        # The inner query selects row IDs from the indexes alone, so that skipped rows are never read.
        chosen = f"SELECT rowid FROM records{clause} ORDER BY {_ORDERS[order]} LIMIT ? OFFSET ?"
        query = f"SELECT {_COLUMNS} FROM records WHERE rowid IN ({chosen}) ORDER BY {_ORDERS[order]}"
        if limit is None and not offset:
            query = f"SELECT {_COLUMNS} FROM records{clause} ORDER BY {_ORDERS[order]} LIMIT ? OFFSET ?"
        return [RolloutRow(*row) for row in self._read(query, [*values, -1 if limit is None else limit, offset])]

    def count(self, where: RolloutFilter) -> int:
        """Return the number of rows."""
        clause, values = where.sql()
        return int(self._figures(f"SELECT COUNT(*) FROM records{clause}", values)[0][0])

    def stats(
        self, where: RolloutFilter, *, by: Grouping | None = None, limit: int | None = None
    ) -> list[RolloutStats]:
        """Return statistics per value of a column, the most frequent first; one line over all if `by` is None."""
        clause, values = where.sql()
        name = "''" if by is None else f"COALESCE(\"{by}\", '')"
        query = (
            f"SELECT {name} AS name, COUNT(*), COUNT(reward), SUM(reward >= {PASS}), AVG(reward), "
            "SUM(reward * reward), MIN(reward), MAX(reward), AVG(turns), AVG(tokens), AVG(wall_s), MAX(stored_at) "
            f"FROM records{clause} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT ?"
        )
        return [_stats(row) for row in self._figures(query, [*values, -1 if limit is None else limit])]

    def curve(
        self, where: RolloutFilter, *, by: Grouping | None, over: Literal["time", "policy_version"], lines: int
    ) -> list[CurvePoint]:
        """Return the learning curve of each of the most frequent values of a column; one over all if `by` is None.

        Rollouts without a reward are not part of it: they failed before they could be scored.
        """
        clause, values = where.having({"min_reward": -math.inf if where.min_reward is None else where.min_reward}).sql()
        name = "''" if by is None else f"COALESCE(\"{by}\", '')"
        if over == "time":
            low, high = self._figures(f"SELECT MIN(stored_at), MAX(stored_at) FROM records{clause}", values)[0]
            if low is None:
                return []
            # The last moment belongs to the last interval, so the width is a little larger than its share.
            width = max((high - low) / _CURVE_POINTS * (1 + 1e-9), 1e-6)
            place, where_values = "CAST((stored_at - ?) / ? AS INTEGER)", [low, width]
            middle = f"{low!r} + (place + 0.5) * {width!r}"
        else:
            place, where_values, middle = "policy_version", [], "place"
        query = (
            f"WITH scored AS (SELECT {name} AS name, {place} AS place, reward, stored_at FROM records{clause}), "
            "frequent AS (SELECT name, COUNT(*) AS count FROM scored GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT ?) "
            f"SELECT name, {middle}, COUNT(*), SUM(reward >= {PASS}), AVG(reward) "
            "FROM scored JOIN frequent USING (name) GROUP BY name, place ORDER BY count DESC, name, MIN(stored_at)"
        )
        return [CurvePoint(*row) for row in self._figures(query, [*where_values, *values, lines])]

    def beside(self, where: RolloutFilter, rollout_id: str, *, order: Order) -> tuple[str | None, str | None]:
        """Return the rollouts before and after one in a list; None at its ends, and if the list does not contain it."""
        clause, values = where.sql()
        window = f"OVER (ORDER BY {_ORDERS[order]})"
        query = (
            f"SELECT before, after FROM (SELECT rollout_id, LAG(rollout_id) {window} AS before, "
            f"LEAD(rollout_id) {window} AS after FROM records{clause}) WHERE rollout_id = ?"
        )
        rows = self._read(query, [*values, rollout_id])
        return rows[0] if rows else (None, None)

    def names(self, column: Grouping, *, limit: int) -> list[tuple[str, int]]:
        """Return the values of a column and their counts, the most frequent first."""
        where = "kind != 'rollout'" if column == "verdict" else "kind = 'rollout'"
        name = f"COALESCE(\"{column}\", '')"
        query = f"SELECT {name}, COUNT(*) FROM records WHERE {where} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT ?"
        return [(str(name), int(count)) for name, count in self._figures(query, [limit])]

    def beginning(self, column: Literal["rollout_id", "verdict"], prefix: str, limit: int = 2) -> list[str]:
        """Return the values of a column with this prefix; only one if it equals the prefix."""
        query = f'SELECT DISTINCT "{column}" FROM records WHERE "{column}" >= ? AND "{column}" < ? ORDER BY 1 LIMIT ?'
        values = [str(row[0]) for row in self._read(query, [prefix, prefix + "\U0010ffff", limit])]
        return [prefix] if prefix in values else values

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        with self._figures_lock:
            if self._figures_db is not None:
                self._figures_db.close()
                self._figures_db = None
        if self._db is not None:
            self._db.close()
            self._db = None

    def _read(self, query: str, values: list[object]) -> list[Any]:
        with self._lock:
            try:
                return self._open().execute(query, values).fetchall()
            except _DAMAGE as exc:  # pages of the file are damaged
                logger.warning("the index %s is rebuilt: %s", self._path, exc)
                self._forget(in_memory=isinstance(exc, sqlite3.OperationalError))
                self._sync()
                return self._open().execute(query, values).fetchall()

    def _figures(self, query: str, values: list[object]) -> list[Any]:
        """Run a query over many rows, and cache its result until the store grows.

        It uses a separate connection, so that lists and single rollouts do not wait for it.
        """
        key, kept = (query, *values), self._kept
        if key in kept:
            return kept[key]
        with self._lock:
            db = self._open()
            if self._in_memory:
                return db.execute(query, values).fetchall()
        with self._figures_lock:
            if self._figures_db is None:
                self._figures_db = sqlite3.connect(self._path, timeout=30, check_same_thread=False)
            while len(kept) >= _KEPT:
                kept.pop(next(iter(kept)), None)
            try:
                kept[key] = self._figures_db.execute(query, values).fetchall()
                return kept[key]
            except _DAMAGE:
                self._figures_db.close()
                self._figures_db = None
        return self._read(query, values)  # which rebuilds a damaged file

    def _open(self, path: str | None = None) -> sqlite3.Connection:
        if self._db is None:
            self._db = sqlite3.connect(path or self._path, timeout=30, isolation_level=None, check_same_thread=False)
            with contextlib.suppress(sqlite3.OperationalError):  # some file systems do not support it
                self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if self._db.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
                self._db.executescript("DROP TABLE IF EXISTS records; DROP TABLE IF EXISTS shards;")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_VERSION}")
        return self._db

    def _forget(self, *, in_memory: bool) -> None:
        self._close()
        self._in_memory = in_memory
        # An OperationalError is about the disk (full, read-only, locked for too long), not about the content. Other
        # processes may use the file, so keep it, and build a private index in this process.
        if in_memory:
            self._open(":memory:")
            return
        for suffix in ("", "-wal", "-shm", "-journal"):
            path = self._path.with_name(self._path.name + suffix)
            if path.is_dir() and not path.is_symlink():
                raise StoreError(f"{path} is a folder; remove it")
            path.unlink(missing_ok=True)

    def _sync(self) -> None:
        db = self._open()
        sizes = self._sizes()
        if sizes != self._seen:
            self._kept = {}  # not `clear()`: a running query may still add an old result to the old dictionary
            self._seen = sizes
        # Usually nothing has changed, and then a reader must not block writers.
        if dict(self._positions(db)) == sizes:
            return
        with db:  # commits, or rolls back after an exception
            # IMMEDIATE takes the write lock before the positions are read. Otherwise two processes would read the same
            # lines of a shard.
            db.execute("BEGIN IMMEDIATE")
            known = dict(self._positions(db))
            for gone in known.keys() - sizes.keys():
                self._drop(db, gone)
            for name, size in sorted(sizes.items()):
                self._sync_shard(db, name, size, known.get(name, 0))

    def _sizes(self) -> dict[str, int]:
        with os.scandir(self._shards) as entries:
            shards = [entry for entry in entries if entry.name.endswith(".jsonl")]
        # A link to a file is followed, because a store may be assembled from others. One to nothing, or to itself, is
        # skipped.
        sizes: dict[str, int] = {}
        for entry in shards:
            with contextlib.suppress(OSError):
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def _positions(self, db: sqlite3.Connection) -> Iterator[tuple[str, int]]:
        yield from db.execute("SELECT name, bytes FROM shards").fetchall()

    def _sync_shard(self, db: sqlite3.Connection, name: str, size: int, done: int) -> None:
        if size < done:  # another file with the same name
            self._drop(db, name)
            done = 0
        if size == done:
            return
        with (self._shards / name).open("rb") as file:
            file.seek(done)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                row = _row(line, name, done)
                if row is not None:
                    try:
                        self._insert(db, row)
                    except (sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError, UnicodeEncodeError) as exc:
                        # A value has another type than its column, or SQLite cannot hold it.
                        logger.warning("a line of %s is not a record and is skipped: %s", name, exc)
                done += len(line)
        db.execute("INSERT OR REPLACE INTO shards (name, bytes) VALUES (?, ?)", (name, done))

    def _insert(self, db: sqlite3.Connection, row: RolloutRow) -> None:
        # A copy of a shard in the same folder repeats its records.
        db.execute(_INSERT, _VALUES(row))
        others = db.execute("SELECT COUNT(*) FROM records WHERE rollout_id = ?", (row.rollout_id,)).fetchone()[0]
        if others > 1:  # verified again; shards are read in any order
            db.execute(f"UPDATE records SET is_last = NOT EXISTS ({_LATER}) WHERE rollout_id = ?", (row.rollout_id,))

    def _drop(self, db: sqlite3.Connection, name: str) -> None:
        ids = db.execute("SELECT DISTINCT rollout_id FROM records WHERE shard = ?", (name,)).fetchall()
        db.execute("DELETE FROM records WHERE shard = ?", (name,))
        db.execute("DELETE FROM shards WHERE name = ?", (name,))
        db.executemany(f"UPDATE records SET is_last = NOT EXISTS ({_LATER}) WHERE rollout_id = ?", ids)


def _row(line: bytes, shard: str, offset: int) -> RolloutRow | None:
    """Return the row of a line, or None if the line is not a record."""
    try:
        record = json.loads(line)
        outcome, task = record["outcome"], record.get("task") or {}
        metadata, about = outcome.get("metadata") or {}, task.get("metadata") or {}
        record_id, kind = str(record["record_id"]), str(record["kind"])
        start: Mapping[str, Any] = outcome.get("start") or {}
        turns: Collection[Mapping[str, Any]] = outcome.get("turns") or ()

        def text(name: str) -> str:
            return str(outcome.get(name) or "")

        return RolloutRow(
            record_id=record_id,
            rollout_id=str(record["rollout_id"]),
            kind=kind,
            verdict=FIRST if kind == "rollout" else str(record.get("verdict") or record_id),
            sequence=sequence_of(record),
            stored_at=float(record["stored_at"]),
            group=group_of(metadata, about),
            task_id=text("task_id"),
            status=text("status"),
            phase=text("phase"),
            reason=outcome.get("reason"),
            reward=outcome.get("reward"),
            trust=outcome.get("trust"),
            agent=text("agent"),
            model=text("model"),
            sandbox=text("sandbox"),
            environment=str(metadata.get("environment") or about.get("environment") or ""),
            parent=str(start["rollout_id"]) if start.get("is_branch") else "",
            parent_call=start.get("call") if start.get("is_branch") else None,
            policy_version="" if metadata.get("policy_version") is None else str(metadata["policy_version"]),
            instruction=str(task.get("instruction") or "")[:_MOST_INSTRUCTION],
            turns=len(turns),
            tokens=sum(len(turn.get("completion_tokens") or turn.get("completion_token_ids") or ()) for turn in turns),
            started_at=float(outcome.get("started_at") or 0.0),
            wall_s=float(outcome.get("wall_s") or 0.0),
            shard=shard,
            offset=offset,
            length=len(line),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError):
        logger.warning("a line of %s is not a record and is skipped", shard)
        return None


def _stats(row: tuple[Any, ...]) -> RolloutStats:
    name, rollouts, scored, passed, mean, squares, lowest, highest, turns, tokens, wall_s, newest = row
    deviation = None
    if scored > 1:  # rounding can make a variance of 0 negative
        deviation = math.sqrt(max(0.0, squares - scored * mean * mean) / (scored - 1))
    return RolloutStats(
        name, rollouts, scored, passed or 0, mean, deviation, lowest, highest, turns, tokens, wall_s, newest
    )
