"""Shards: files of JSON lines that are only ever appended to, one per writing process.

Knows files and bytes. A line counts once its newline is there, so what a crash tore off at the end is never read; a
line that cannot be written whole is taken back.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line is."""

    shard: str
    offset: int
    length: int


class ShardWriter:
    """Appends lines to a shard of its own, made with the first line; safe from many threads and after a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._path = folder
        self._owner = 0

    def append(self, record: dict[str, Any]) -> Place:
        """Write a line and wait until it is on the disk.

        Raises:
            OSError: it could not be written; nothing of it remains.
        """
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            handle = self._open()
            offset = os.lseek(handle, 0, os.SEEK_END)
            try:
                _write_all(handle, line)
                os.fsync(handle)
            except OSError:
                self._take_back(handle, offset)
                raise
            return Place(self._path.name, offset, len(line))

    def close(self) -> None:
        """Close the file; a later line begins another shard."""
        with self._lock:
            self._drop()

    def _open(self) -> int:
        if self._handle is not None and self._owner != os.getpid():
            self._drop()  # a copy of this process writes to the old one
        if self._handle is None:
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            self._path = self._folder / f"{stamp}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
            self._handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._owner = os.getpid()
        return self._handle

    def _take_back(self, handle: int, offset: int) -> None:
        try:
            os.ftruncate(handle, offset)
        except OSError:
            logger.warning("a torn line stays in %s", self._path)
            self._drop()  # nothing may be appended to it

    def _drop(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read_line(folder: Path, place: Place) -> dict[str, Any]:
    """Return one record.

    Raises:
        OSError, ValueError: it is not there any more.
    """
    with (folder / place.shard).open("rb") as file:
        file.seek(place.offset)
        record = json.loads(file.read(place.length))
    if not isinstance(record, dict):
        raise ValueError("no record")
    return record


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[Place, dict[str, Any] | None]]:
    """Yield the whole lines from an offset on; None in place of one that cannot be read."""
    with path.open("rb") as file:
        file.seek(start)
        offset = start
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield Place(path.name, offset, len(line)), _parse(line, path)
            offset += len(line)


def _parse(line: bytes, path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        return record
    logger.warning("a line of %s cannot be read and is left out", path)
    return None


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
