"""The store of rollouts: append-only shards, an index, and each rollout's task, work tree and model calls.

A rollout is stored when its line is in a shard; files are put in place before that. Nothing that was stored is ever
changed: verifying again appends another record. Any number of processes may write to one store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import ValidationError

from openenv.errors import StoreError
from openenv.rollout.index import Index, Row
from openenv.rollout.outcome import Outcome
from openenv.rollout.shards import ShardWriter, read_line
from openenv.rollout.task import Task

try:
    import fcntl
except ImportError:  # no such locks on this platform: a rollout that still runs looks interrupted
    fcntl = None  # type: ignore[assignment]

Kind = Literal["rollout", "reverify"]
_FORMAT = 1
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class Record:
    """One stored line: a rollout, or a later verification of it."""

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
        if not create and not self._shards.is_dir():
            what = "is no store of rollouts" if self.root.exists() else "does not exist"
            raise StoreError(f"There are no rollouts in {self.root}: it {what}")
        with _typed("opened"):
            for folder in (self._shards, self._rollouts, self.captures):
                folder.mkdir(parents=True, exist_ok=True)
        self._writer = ShardWriter(self._shards)
        self._index = Index(self.root / "index.sqlite", self._shards)
        self._running: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def captures(self) -> Path:
        """Return the folder of the recorded model calls."""
        return self.root / "captures"

    def begin(self, rollout_id: str, task: Task) -> None:
        """Note that a rollout runs, so that one which is never stored can be told.

        Raises:
            StoreError: there is such a rollout already, or the disk is full.
        """
        folder = self._folder(rollout_id)
        try:
            with _typed("begun"):
                folder.mkdir()
                try:
                    self._hold(rollout_id, folder)
                    _write(folder / "task.json", task.model_dump_json().encode())
                except OSError:
                    self._let_go(rollout_id)
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
        """Store what came of a rollout, with copies of its files; those that are not there are left out.

        Raises:
            StoreError: the disk is full, or the rollout was stored before; nothing of it is listed.
        """
        rollout_id = outcome.rollout_id
        if rollout_id not in self._running:
            self.begin(rollout_id, task)
        folder = self._folder(rollout_id)
        given = {"worktree.tar": worktree, "baseline.tar": baseline, "agent.log": agent_log}
        try:
            with _typed("stored", outcome):
                for name, source in given.items():
                    if source is not None and source.exists():
                        _copy(source, folder / name)
                return self._append("rollout", outcome, task)
        except StoreError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self._let_go(rollout_id)

    def keep_capture(self, rollout_id: str, records: Path) -> None:
        """Copy the records of a rollout's model calls, unless they were written here.

        Raises:
            StoreError: the disk is full.
        """
        place = self.captures / rollout_id
        with _typed("stored"):
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
        with _typed("stored", outcome):
            return self._append("reverify", outcome, task)

    def get(self, rollout_id: str, *, record_id: str | None = None) -> Record:
        """Return a rollout's newest record, or a certain one; the beginning of an id will do when it is the only one.

        Raises:
            StoreError: there is no such record.
        """
        records = self.history(rollout_id)
        for record in records:
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
        found = {row.rollout_id for row in self._index.find() if rollout_id and row.rollout_id.startswith(rollout_id)}
        if len(found) == 1:
            return found.pop()
        how = "There is no rollout" if not found else "There are several rollouts that begin with"
        raise StoreError(f"{how} '{rollout_id}' in {self.root}")

    def find(self, *, limit: int | None = None, latest: bool = True, **equal: str | None) -> list[Row]:
        """Return rows of the index, newest first; by default the newest record of each rollout.

        Args:
            limit: At most so many.
            latest: False for every record, verified again or not.
            equal: `task_id`, `status`, `agent`, `model`, `sandbox`, `kind` or `rollout_id` and the value it must have.
        """
        self._index.sync()
        return self._index.find(limit=limit, latest=latest, **equal)

    def read(self, row: Row) -> Record:
        """Return the record of a row.

        Raises:
            StoreError: it is not there any more.
        """
        try:
            return _record(read_line(self._shards, row.place))
        except (OSError, ValueError, KeyError, ValidationError) as exc:
            raise StoreError(f"The record of rollout '{row.rollout_id}' cannot be read: {exc}") from exc

    def records(self, *, limit: int | None = None, **equal: str | None) -> Iterator[Record]:
        """Yield the newest record of each rollout, oldest first."""
        for row in reversed(self.find(limit=limit, latest=True, **equal)):
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
        return [name for name in names if name not in stored and not _is_held(self._rollouts / name / ".running")]

    def rebuild(self) -> None:
        """Make the index anew from the shards."""
        self._index.rebuild()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        self._index.close()
        for rollout_id in list(self._running):
            self._let_go(rollout_id)

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _folder(self, rollout_id: str) -> Path:
        if not rollout_id or rollout_id.startswith(".") or "/" in rollout_id or "\0" in rollout_id:
            raise StoreError(f"'{rollout_id}' is no id of a rollout")
        return self._rollouts / rollout_id

    def _append(self, kind: Kind, outcome: Outcome, task: Task) -> Record:
        record = Record(secrets.token_hex(8), outcome.rollout_id, kind, time.time(), outcome, task)
        line = {
            "format": _FORMAT,
            "record_id": record.record_id,
            "rollout_id": record.rollout_id,
            "kind": kind,
            "stored_at": record.stored_at,
            "outcome": outcome.model_dump(mode="json"),
            "task": task.model_dump(mode="json"),
        }
        place = self._writer.append(line)
        self._index.sync(place.shard)
        return record

    def _hold(self, rollout_id: str, folder: Path) -> None:
        handle = os.open(folder / ".running", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        with self._lock:
            self._running[rollout_id] = handle

    def _let_go(self, rollout_id: str) -> None:
        with self._lock:
            handle = self._running.pop(rollout_id, None)
        if handle is not None:
            (self._rollouts / rollout_id / ".running").unlink(missing_ok=True)
            os.close(handle)


def _record(line: dict[str, Any]) -> Record:
    return Record(
        record_id=line["record_id"],
        rollout_id=line["rollout_id"],
        kind=line["kind"],
        stored_at=line["stored_at"],
        outcome=Outcome.model_validate(line["outcome"]),
        task=Task.model_validate(line["task"]),
    )


def _is_held(path: Path) -> bool:
    if fcntl is None:
        return False
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _copy(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}")
    with source.open("rb") as given, draft.open("wb") as file:
        shutil.copyfileobj(given, file, 1024 * 1024)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(target)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _typed(what: str, outcome: Outcome | None = None) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as exc:
        why = "the disk is full" if exc.errno in _FULL else str(exc)
        raise StoreError(f"The rollout could not be {what}: {why}", outcome=outcome) from exc
