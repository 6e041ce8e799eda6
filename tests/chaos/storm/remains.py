"""What this process must not have more of after a storm than before: threads, processes, sockets, files."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

from .server import wait_until

WAIT_S = 30.0


class Remains:
    """Looks at what there is now, to compare later."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._processes = _children()
        self._sockets = sockets()
        self._files = _files()

    def found(self) -> tuple[list[str], list[str]]:
        """Wait until all is as it was, and return what is not: names of threads, and whatever else."""
        gc.collect()
        wait_until(lambda: not (self._more_threads() or self._others()), WAIT_S)
        return self._more_threads(), self._others()

    def _more_threads(self) -> list[str]:
        return sorted(thread.name for thread in set(threading.enumerate()) - self._threads)

    def _others(self) -> list[str]:
        processes = [f"process {pid}" for pid in sorted(_children() - self._processes)]
        more = len(sockets() - self._sockets)
        files = [f"file {name}" for name in sorted(_files() - self._files)]
        return [*processes, *([f"{more} sockets"] if more else []), *files]


def _children() -> set[int]:
    """The processes that this one has started and that have not ended."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(entry.parent.name))
    return found


def sockets() -> set[str]:
    """The sockets of this process."""
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket:")}


def _files() -> set[str]:
    """What is where this process and its children put temporary files; only if that is a place of its own."""
    place = os.environ.get("STORM_TMPDIR")
    return {path.name for path in Path(place).iterdir()} if place else set()
