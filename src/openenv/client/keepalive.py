"""One thread that answers pings on behalf of blocking clients while their owners are busy elsewhere.

A trainer may think for minutes between two steps; without this its server would take it for dead. Knows connections
and their locks; must not know clients.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from typing import Any, Protocol
from weakref import WeakSet

# process: What a forked process may keep of its parent's: nothing that both would use at the same time.
#
# Knows process ids, locks and loops; must not know connections.


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


_PERIOD_S = 5.0


class Tended(Protocol):
    """Something that wants to be looked after now and then."""

    def tend(self) -> None:
        """Answer what waits to be answered; must not block."""
        ...


class Tender:
    """Looks after connections; its thread lives as long as there are any."""

    def __init__(self, period_s: float = _PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = ProcessLock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._tended: WeakSet[Tended] = WeakSet()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def _settle(self) -> None:
        """Begin anew in a forked process, which has neither the thread nor the connections; the lock is held."""
        if self._pid != os.getpid():
            self._begin()

    def add(self, connection: Tended) -> None:
        """Look after a connection from now on."""
        with self._lock.here():
            self._settle()
            self._tended.add(connection)
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, name="openenv-client-keepalive", daemon=True)
                self._thread.start()

    def discard(self, connection: Tended) -> None:
        """Look after it no more."""
        with self._lock.here():
            self._settle()
            self._tended.discard(connection)
            if not self._tended:
                self._wake.set()

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(self._period_s)
            with self._lock.here():
                self._wake.clear()
                connections = list(self._tended)
                if not connections:
                    self._thread = None
                    return
            if not woken:
                while connections:  # emptied, so that none is kept alive while this thread sleeps
                    connections.pop().tend()
            del connections


TENDER = Tender()
