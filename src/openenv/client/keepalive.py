"""One thread that answers pings for blocking clients, and locks that survive a fork.

A trainer may compute for minutes between two steps; without this thread its server would take it for dead. Must not
know clients.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from typing import Any, Protocol
from weakref import WeakSet

_PERIOD_S = 5.0


class ProcessLock:
    """A lock for each process: one that was held at the moment of a fork would never be released in the child."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.Lock()}

    def here(self) -> threading.Lock:
        """Return the lock of this process, the same one to all its threads."""
        pid = os.getpid()
        lock = self._locks.get(pid)
        return lock if lock is not None else self._locks.setdefault(pid, threading.Lock())


def close_loop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Close a loop that the process `pid` has made; in a fork of that process, leave the parent's loop as it is."""
    if loop.is_running() or loop.is_closed():
        return
    if pid != os.getpid():
        shared: Any = loop
        if not hasattr(shared, "_selector"):
            return
        # Both processes share one selector: what is unregistered here is gone there. So only our end of it is closed.
        shared._selector.close()
        shared._selector = selectors.SelectSelector()
    loop.close()


class KeptAlive(Protocol):
    """A blocking client: `EnvClient`'s driver, or a `VectorEnv`."""

    def keep_alive(self) -> None:
        """Answer the server's pings; must not block."""
        ...


class KeepaliveThread:
    """Keeps connections alive; its thread lives as long as there are any."""

    def __init__(self, period_s: float = _PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = ProcessLock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._clients: WeakSet[KeptAlive] = WeakSet()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def _leave_stale(self) -> None:
        """Start over in a forked process, which has neither the thread nor the connections; the lock is held."""
        if self._pid != os.getpid():
            self._begin()

    def add(self, client: KeptAlive) -> None:
        """Keep a client's connections alive from now on."""
        with self._lock.here():
            self._leave_stale()
            self._clients.add(client)
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, name="openenv-client-keepalive", daemon=True)
                self._thread.start()

    def discard(self, client: KeptAlive) -> None:
        """Stop doing so."""
        with self._lock.here():
            self._leave_stale()
            self._clients.discard(client)
            if not self._clients:
                self._wake.set()

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(self._period_s)
            with self._lock.here():
                self._wake.clear()
                clients = list(self._clients)
                if not clients:
                    self._thread = None
                    return
            if not woken:
                while clients:  # emptied, so that none is kept alive while this thread sleeps
                    clients.pop().keep_alive()
            del clients


KEEPALIVE = KeepaliveThread()
