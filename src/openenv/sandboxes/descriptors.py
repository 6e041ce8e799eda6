"""File descriptors of this process: how many there may be (RLIMIT_NOFILE), and how connections share them.

A connection of an agent takes up to four: two in the relay of its sandbox, one in the capture proxy, one to the model's
endpoint. Code in a sandbox opens as many as it likes, and a process without descriptors fails for every sandbox.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

with contextlib.suppress(ImportError):  # not there on every platform
    import resource

LOW = 4096
"""A limit below this is worth a note: it is enough for about a hundred sandboxes."""
_DEFAULT = 1024
_UNLIMITED = 1 << 40
_PER_CONNECTION = 4
_MOST_SHARED = 1024
_MOST_INSIDE = 65536


def _limits() -> tuple[int, int]:
    """Return the soft and the hard limit of this process."""
    try:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    except NameError:
        return _DEFAULT, _DEFAULT
    soft, hard = (_UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def file_limit() -> int:
    """Return how many descriptors this process may have."""
    return _limits()[0]


def raise_file_limit() -> int:
    """Raise this process's limit as far as the system allows without further rights, and return the limit.

    For programs: a library must not change the limits of the process that it is used in.
    """
    with contextlib.suppress(NameError, ValueError, OSError):  # macOS reports a hard limit that it does not accept
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return file_limit()


def limit_inside(processes: int) -> int:
    """Return the limit for each process of a sandbox: all of them together get a quarter of the machine's descriptors.

    The kernel counts open files in all (`fs.file-max`), and a sandbox has memory for millions.
    """
    try:
        machine = int(Path("/proc/sys/fs/file-max").read_text())
    except (OSError, ValueError):
        machine = _UNLIMITED
    _, hard = _limits()
    return max(_DEFAULT, min(machine // 4 // processes, _MOST_INSIDE, hard))


class ConnectionQuota:
    """Divides connections among holders, such as sandboxes, so that none of them keeps another out.

    Every holder has `own` reserved places. Beyond these, places come from one pool; a holder gets at
    most half of it. With a limit of 1,024 descriptors and 4 places each:

        pool of 64 (a quarter of the descriptors)       A floods: 4 + 32, then it is refused
        own places: A 4 · B 4 · C 4 · ...               B, C, ...: 4 each, and the other half of the pool

    Usable from any thread.

    Args:
        own: The places that every holder has.
        shared: The size of the pool; by default a quarter of this process's descriptors.
        most: A limit for one holder, in addition to half of the pool.
    """

    def __init__(self, *, own: int = 4, shared: int | None = None, most: int = 128) -> None:
        if shared is None:
            shared = min(_MOST_SHARED, file_limit() // 4 // _PER_CONNECTION)
        self.own = own
        self.shared = shared
        self.most = max(own, min(most, own + shared // 2))
        """The number of places that one holder can have."""
        self._held: Counter[Hashable] = Counter()
        self._pooled = 0
        self._lock = threading.Lock()

    def take(self, holder: Hashable) -> bool:
        """Give the holder one more place, if there is one for it."""
        with self._lock:
            held = self._held[holder]
            if held >= self.own:
                if held >= self.most or self._pooled >= self.shared:
                    return False
                self._pooled += 1
            self._held[holder] = held + 1
            return True

    def release(self, holder: Hashable) -> None:
        """Take a place of the holder back."""
        with self._lock:
            held = self._held.pop(holder)
            self._pooled -= held > self.own
            if held > 1:
                self._held[holder] = held - 1

    def held(self, holder: Hashable) -> int:
        """Return how many places a holder has."""
        return self._held[holder]
