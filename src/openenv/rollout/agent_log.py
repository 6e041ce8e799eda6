"""The agent's log: what it printed, kept on disk up to a limit, and its end at hand.

Knows bytes. An agent that prints without end fills neither the disk nor the memory.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from openenv.sandboxes.base import Stream

MAX_BYTES = 16 * 1024 * 1024
_TAIL = 256 * 1024


class AgentLog:
    """A file that output is appended to; a context manager."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._file = path.open("wb")
        self._lock = threading.Lock()
        self._left = max_bytes
        self._tail = bytearray()

    def feed(self, stream: Stream, data: bytes) -> None:
        """Take output of either stream, as it comes."""
        with self._lock:
            if self._left > 0 and not self._file.closed:
                self._file.write(data[: self._left])
                self._left -= len(data)
            self._tail += data[-_TAIL:]
            if len(self._tail) > 2 * _TAIL:
                del self._tail[:-_TAIL]

    def tail(self, chars: int = _TAIL) -> str:
        """Return the end of what came."""
        with self._lock:
            return bytes(self._tail).decode("utf-8", "replace")[-chars:]

    def __enter__(self) -> AgentLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._file.close()
