"""Recorded episodes on disk: one JSON Lines file each, in a folder with limits on files and bytes.

Several processes may write to one folder: each file has one writer, and any process deletes the oldest ones. Light: the
command line reads these files without a server.

    {"kind": "episode", "version": 1, "id": "20260102-030405-1f2e3d4c", "env": "maze_env", "session": ..., ...}
    {"kind": "reset", "arguments": {"seed": 7}, "observation": {...}, "reward": null, "done": false, "at": ..., ...}
    {"kind": "picture", "n": 0, "html": "<b>...</b>"}
    {"kind": "step", "n": 1, "action": {...}, "observation": {...}, "reward": 1.0, "done": true, "at": ..., "ms": ...}
    {"kind": "step", "n": 2, "action": {...}, "error": {"type": "ValueError", "message": ..., "traceback": ...}, ...}
    {"kind": "call", "n": 2, "name": "look", "arguments": {}, "result": {...}, "at": ..., "ms": ...}
    {"kind": "end", "reason": "done", "at": ..., and the figures of `EpisodeSummary`}

A file without an `end` belongs to a running episode, or to one that the end of its server interrupted; then its last
line may be incomplete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openenv.errors import OpenEnvError

VERSION: Final = 1
ENDING: Final = ".jsonl"
INTERRUPTED: Final = "the server stopped"
_ID: Final = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6,12}")
_TAIL_BYTES: Final = 16 * 1024  # usually enough for the last line of a complete file
_YOUNG_S: Final = 10.0  # another process's file that changed within this time belongs to a running episode


class EpisodeError(OpenEnvError):
    """A recorded episode does not exist, or its file cannot be read."""

    code = "EPISODE_ERROR"


@dataclass(slots=True)
class EpisodeSummary:
    """The statistics of an episode, computed from its rows.

    Args:
        id: Its name, which begins with its date.
        host, pid: Which process has played it.
        ended_at: When its last row came.
        reason: Why it ended: `done`, `terminated`, `truncated`, `reset` (another one began before it was over), or why
            its session ended; None while it runs.
        total: The sum of its rewards.
        is_whole: Whether every row is there: a full disk or a busy server may have cost some.
    """

    id: str
    env: str = ""
    session: str = ""
    opened_by: str = ""
    host: str = ""
    pid: int = 0
    began_at: float = 0.0
    ended_at: float | None = None
    seed: Any = None
    arguments: dict[str, Any] | None = None
    steps: int = 0
    errors: int = 0
    calls: int = 0
    total: float = 0.0
    last_reward: float | None = None
    done: bool = False
    truncated: bool | None = None
    terminated: bool | None = None
    reason: str | None = None
    is_whole: bool = True
    size: int = field(default=0, compare=False)

    @property
    def why(self) -> str:
        """Why the episode is over as far as its steps tell: `terminated`, `truncated`, `done`, or nothing yet."""
        if not self.done:
            return ""
        if self.terminated:
            return "terminated"
        return "truncated" if self.truncated else "done"

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row into account."""
        kind = row.get("kind")
        if kind == "episode":
            for name in ("env", "session", "opened_by", "host", "pid", "began_at"):
                setattr(self, name, row.get(name) or getattr(self, name))
        elif kind == "end":
            self.reason = str(row.get("reason"))
            self.is_whole = self.is_whole and row.get("is_whole") is not False
        elif kind in ("reset", "step", "call"):
            self.ended_at = row.get("at")
            self.errors += "error" in row
            if kind == "reset":
                self._add_reset(row)
            elif kind == "call":
                self.calls += 1
            elif "error" not in row:
                self.steps += 1
            if kind != "call":
                self._add_outcome(row)

    def _add_reset(self, row: Mapping[str, Any]) -> None:
        arguments = row.get("arguments")
        self.arguments = dict(arguments) if isinstance(arguments, Mapping) else None
        self.seed = (self.arguments or {}).get("seed")

    def _add_outcome(self, row: Mapping[str, Any]) -> None:
        if "error" in row:
            return
        reward, observation = row.get("reward"), row.get("observation")
        self.last_reward = float(reward) if isinstance(reward, int | float) else None
        self.total += self.last_reward or 0.0
        self.done = bool(row.get("done"))
        if isinstance(observation, Mapping):
            self.truncated, self.terminated = observation.get("truncated"), observation.get("terminated")

    def document(self) -> dict[str, Any]:
        """Return the summary for JSON."""
        return {**self.fields(), "return": self.total}

    def fields(self) -> dict[str, Any]:
        """Return all fields without copying: a list has a thousand of these."""
        return {name: getattr(self, name) for name in self.__slots__}


def new_id(now: float) -> str:
    """Return the name of an episode that begins now; names sort as their episodes began, to the millisecond."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{moment}-{int(now % 1 * 1000):03d}{secrets.token_hex(3)}"


def is_id(text: str) -> bool:
    """Return whether a text is a valid episode name; invalid names are never looked up on disk."""
    return _ID.fullmatch(text) is not None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a file; skip an incomplete last line and invalid rows.

    Raises:
        EpisodeError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):  # invalid, or nested too deeply
                    continue
                if isinstance(row, dict) and isinstance(row.get("kind"), str):
                    yield row
    except OSError as exc:
        raise EpisodeError(f"{path.name} cannot be read: {exc.strerror or exc}") from exc


def summarise(rows: Iterable[Mapping[str, Any]], episode_id: str = "") -> EpisodeSummary:
    """Compute the statistics of an episode from its rows."""
    summary = EpisodeSummary(episode_id)
    for row in rows:
        if row.get("kind") == "episode":
            summary.id = str(row.get("id") or episode_id)
        summary.add(row)
    return summary


class EpisodeFiles:
    """A folder of recorded episodes.

    Args:
        folder: Where; it is made with the first episode.
        most: How many episodes are kept.
        most_bytes: How many bytes all files together may have.
    """

    def __init__(self, folder: Path, *, most: int, most_bytes: int) -> None:
        self.folder = folder
        self.most = most
        self.most_bytes = most_bytes
        self._known: OrderedDict[str, EpisodeSummary] = OrderedDict()  # of files that have ended
        self._lock = threading.Lock()

    def path(self, episode_id: str) -> Path:
        """Return the file of an episode.

        Raises:
            EpisodeError: There can be none of that name.
        """
        if not is_id(episode_id):
            raise EpisodeError(f"Unknown episode {episode_id[:80]!r}")
        return self.folder / f"{episode_id}{ENDING}"

    def append(self, episode_id: str, lines: bytes, *, is_first: bool = True) -> None:
        """Write whole lines to the end of an episode's file; a failure leaves the file as it was.

        Args:
            episode_id: The episode.
            lines: The lines to write.
            is_first: Whether to create the file. A deleted file must not be created again without its first line.

        Raises:
            OSError: The disk is full, the folder cannot be written to, or the file is gone.
        """
        path = self.path(episode_id)
        if is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if is_first else "r+b", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            before = os.fstat(file.fileno()).st_size
            view = memoryview(lines)
            try:
                while view:
                    view = view[file.write(view) or 0 :]
            except OSError:
                os.ftruncate(file.fileno(), before)  # a partial line would corrupt the next one
                raise

    def rows(self, episode_id: str) -> list[dict[str, Any]]:
        """Read an episode.

        Raises:
            EpisodeError: There is none, or it cannot be read.
        """
        path = self.path(episode_id)
        if not path.is_file() or path.is_symlink():
            raise EpisodeError(f"Unknown episode '{episode_id}'; the oldest episodes are deleted")
        return list(read_rows(path))

    def summaries(self, limit: int) -> list[EpisodeSummary]:
        """List the newest episodes, newest first."""
        names = sorted((name for name, _, _ in self._entries()), reverse=True)
        result = []
        for episode_id in names[:limit]:
            try:
                result.append(self.summary(episode_id))
            except EpisodeError:  # deleted meanwhile
                continue
        return result

    def count(self) -> int:
        """Return the number of episodes."""
        return len(self._entries())

    def summary(self, episode_id: str) -> EpisodeSummary:
        """Return the statistics of an episode; cache them from the last line of an ended one.

        Raises:
            EpisodeError: There is none, or it cannot be read.
        """
        with self._lock:
            known = self._known.get(episode_id)
        if known is not None:
            return known
        path = self.path(episode_id)
        summary = _from_last_line(path, episode_id) or summarise(self.rows(episode_id), episode_id)
        summary.id = episode_id
        summary.size = path.stat().st_size if path.is_file() else 0
        if summary.reason is not None:
            with self._lock:
                self._known[episode_id] = summary
                while len(self._known) > 2 * self.most:
                    self._known.popitem(last=False)
        return summary

    def evict(self, running: frozenset[str], now: float) -> int:
        """Delete the oldest episodes until the rest is within both limits; return how many.

        Args:
            running: Episodes of this process that still run.
            now: The time, as files have it.
        """
        entries = sorted(self._entries())
        count, size, deleted = len(entries), sum(each for _, each, _ in entries), 0
        for name, each, changed_at in entries:
            if count <= self.most and size <= self.most_bytes:
                break
            if name in running or (now - changed_at < _YOUNG_S and not self._has_ended(name)):
                continue
            (self.folder / f"{name}{ENDING}").unlink(missing_ok=True)
            with self._lock:
                self._known.pop(name, None)
            count, size, deleted = count - 1, size - each, deleted + 1
        return deleted

    def _has_ended(self, episode_id: str) -> bool:
        return _from_last_line(self.folder / f"{episode_id}{ENDING}", episode_id) is not None

    def _entries(self) -> list[tuple[str, int, float]]:
        """Return name, size and last change of each file."""
        entries = []
        try:
            with os.scandir(self.folder) as found:
                for entry in found:
                    name = entry.name.removesuffix(ENDING)
                    # A link may lead out of the folder, and a named pipe never ends.
                    if name == entry.name or not is_id(name) or not entry.is_file(follow_symlinks=False):
                        continue
                    with contextlib.suppress(OSError):  # deleted meanwhile
                        status = entry.stat()
                        entries.append((name, status.st_size, status.st_mtime))
        except OSError:  # not there yet
            return entries
        return entries


def _from_last_line(path: Path, episode_id: str) -> EpisodeSummary | None:
    """Return the statistics in the `end` row of a file; None without such a row."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return None
    try:
        row = json.loads(last)
        if row["kind"] != "end":
            return None
        return EpisodeSummary(**{**row["summary"], "id": episode_id})
    except (ValueError, TypeError, KeyError, RecursionError):  # incomplete, invalid, or from another version
        return None
