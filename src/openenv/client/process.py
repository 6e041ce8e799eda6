"""What a forked process may keep of its parent's: nothing that both would use at the same time.

Knows process ids, locks and loops; must not know connections.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from typing import Any


class ProcessLock:
    """A lock for each process: one that was held when this process was forked off would never be released here."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.Lock()}

    def here(self) -> threading.Lock:
        """Return the lock of this process, the same one to all its threads."""
        pid = os.getpid()
        lock = self._locks.get(pid)
        return lock if lock is not None else self._locks.setdefault(pid, threading.Lock())


def close_loop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Close a loop that the process `pid` has made; in a fork of that process, leave the other's loop as it is."""
    if loop.is_running() or loop.is_closed():
        return
    if pid != os.getpid():
        shared: Any = loop
        if not hasattr(shared, "_selector"):
            return
        # Both processes see one selector: what is unregistered here is gone there. So only our end of it is closed.
        shared._selector.close()
        shared._selector = selectors.SelectSelector()
    loop.close()
