"""One thread that answers pings on behalf of blocking clients while their owners are busy elsewhere.

A trainer may think for minutes between two steps; without this its server would take it for dead. Knows connections
and their locks; must not know clients.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

from .process import ProcessLock

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
