"""The file in which a rollout's calls are written down before anybody sees them.

Knows framing: each entry is a line of JSON, and where that has `len`, as many bytes and a line break after it. Must not
know what the entries mean. What `append` has returned from outlives a killed process (not a power cut).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openenv.errors import CaptureError
from openenv.rollout.capture.encoding import Json, dumps, load_object


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
class Entry:
    """One entry: its line, and its bytes."""

    head: Json
    payload: bytes


@dataclass(frozen=True, slots=True)
class Entries:
    """All entries of a file; `torn` is how many bytes at its end are no whole entry."""

    entries: list[Entry]
    torn: int


def read_entries(path: Path) -> Entries:
    """Read a journal, also one whose writer was killed.

    Raises:
        CaptureError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise CaptureError(f"Cannot read {path}: {exc}") from exc
    entries: list[Entry] = []
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
            entries.append(Entry(head, data[start : start + length]))
            position = start + length + 1
        else:
            entries.append(Entry(head, b""))
            position = start
    return Entries(entries, len(data) - position)
