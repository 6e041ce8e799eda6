"""User IDs of local sandboxes that root starts: each sandbox has a unique ID while it lives.

The kernel counts some things by user, for the whole machine: inotify instances and watches, memory of pipes, pending
signals, message queues, keys, processes under RLIMIT_NPROC. With one user for all sandboxes, one of them could use up
the resources of the others.

An id is free if its byte of a lock file can be locked. The kernel drops the locks of a process that ends in any way, so
nothing has to be reclaimed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from openenv.errors import SandboxError

with contextlib.suppress(ImportError):  # Windows has none, and never gets to use it
    import fcntl

LOCK_FILE = Path("/run/openenv-user-ids.lock")
_TRIES = 1000
# Between the IDs of users and services (below 65536) and the IDs that machines give to containers (from 100000 on);
# small enough for the headers of old archive formats. Containers often have ids below 65536 only.
_DEFAULTS = (range(70_000, 100_000), range(30_000, 60_000))


class UserIds:
    """Hands out user ids, each to one sandbox of this machine at a time.

    Args:
        ids: The range; by default the first of 70000-99999 and 30000-59999 that exists here.
        lock_file: Where the ids in use are locked. Programs that cannot see the same file may use the same ids: the
            choice is random, so that this is rare.

    Raises:
        SandboxError: These ids do not exist here.
    """

    def __init__(self, ids: range | None = None, *, lock_file: Path | None = None) -> None:
        known = list(_mapped(Path("/proc/self/uid_map"))), list(_mapped(Path("/proc/self/gid_map")))
        places = [ids] if ids is not None else _DEFAULTS
        exists = [place for place in places if all(any(_within(place, one) for one in kind) for kind in known)]
        if not exists:
            raise SandboxError(f"user and group ids {' or '.join(map(shown, places))} do not exist here")
        self.ids = exists[0]
        self._used: set[int] = set()
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a sandbox at any point
        self._file: int | None = None
        with contextlib.suppress(OSError):  # a read-only /run: this object still hands out no id twice
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(lock_file or LOCK_FILE, flags, 0o600)
            weakref.finalize(self, os.close, self._file)

    def take(self) -> int:
        """Return an ID that no living sandbox has.

        Raises:
            SandboxError: All are in use.
        """
        start = secrets.randbelow(len(self.ids))
        with self._lock:
            for step in range(min(len(self.ids), _TRIES)):
                uid = self.ids[(start + step) % len(self.ids)]
                if uid not in self._used and self._set_lock(uid, fcntl.F_WRLCK):
                    self._used.add(uid)
                    return uid
        raise SandboxError(f"All user ids for sandboxes are in use: {shown(self.ids)}.")

    def release(self, uid: int) -> None:
        """Take an id back: its sandbox has ended."""
        with self._lock:
            if uid in self._used:
                self._used.discard(uid)
                self._set_lock(uid, fcntl.F_UNLCK)

    def _set_lock(self, uid: int, kind: int) -> bool:
        if self._file is None:
            return True
        # struct flock. The lock belongs to this open file, not to the process, which may have another backend.
        request = struct.pack("hhqqi", kind, os.SEEK_SET, uid, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True


def shown(ids: range) -> str:
    """Return a range as users write it."""
    return f"{ids.start}-{ids.stop - 1}"


def _mapped(table: Path) -> Iterator[range]:
    """Yield the ids that exist in this process's user namespace."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        first, _, count = map(int, line.split())
        yield range(first, first + count)


def _within(part: range, whole: range) -> bool:
    return part.start >= whole.start and part.stop <= whole.stop
