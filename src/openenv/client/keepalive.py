"""One thread that answers pings on behalf of blocking clients while their owners are busy elsewhere.

A trainer may think for minutes between two steps; without this its server would take it for dead. Knows connections
and their locks; must not know clients.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet

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
        self._tended: WeakSet[Tended] = WeakSet()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, connection: Tended) -> None:
        """Look after a connection from now on."""
        with self._lock:
            self._tended.add(connection)
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, name="openenv-client-keepalive", daemon=True)
                self._thread.start()

    def discard(self, connection: Tended) -> None:
        """Look after it no more."""
        with self._lock:
            self._tended.discard(connection)
            if not self._tended:
                self._wake.set()

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(self._period_s)
            with self._lock:
                self._wake.clear()
                connections = list(self._tended)
                if not connections:
                    self._thread = None
                    return
            if not woken:
                for connection in connections:
                    connection.tend()
            del connections


TENDER = Tender()
