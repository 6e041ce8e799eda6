"""One thread that reads from all workers and notices when one has ended. Knows sockets and process ids only."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


class Subscriber(Protocol):
    """A worker, as far as the switchboard is concerned. All of it is called in the switchboard's thread."""

    socket: socket.socket

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def read(self) -> bool | None:
        """Take what has come; None where there is nothing now, False where nothing will come any more."""
        ...

    def write(self) -> bool:
        """Send what waits; say whether some still does."""
        ...

    def is_running(self) -> bool:
        """Say whether the process is there."""
        ...

    def gone(self) -> None:
        """The process has ended, or does not speak any more."""
        ...


class Switchboard:
    """Reads for its subscribers.

    Args:
        look: Called now and then, in the thread.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._todo: deque[Callable[[], None]] = deque()
        self._pidfds: dict[Subscriber, int] = {}
        self._known: set[Subscriber] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="openenv-workers", daemon=True)
        self._thread.start()

    def add(self, worker: Subscriber) -> None:
        """Read for a worker until it is gone."""
        self._do(lambda: self._add(worker))

    def watch_writes(self, worker: Subscriber) -> None:
        """Have a worker write when its socket takes more."""
        self._do(lambda: self._watch_writes(worker))

    def stop(self) -> None:
        """End the thread, once all workers are gone."""
        self._is_stopping = True
        self._do(lambda: None)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is about to wake; closed: it has ended
            self._wake_in.send(b"\0")

    # -- in the thread --------------------------------------------------------------------------------------------

    def _add(self, worker: Subscriber) -> None:
        self._known.add(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, (worker, "socket"))
        opened = _pidfd(worker.pid)
        if opened is not None:
            self._pidfds[worker] = opened
            self._selector.register(opened, selectors.EVENT_READ, (worker, "process"))

    def _watch_writes(self, worker: Subscriber) -> None:
        if worker in self._known:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(worker.socket, events, (worker, "socket"))

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._is_stopping or self._todo or self._known:
            for key, mask in self._selector.select(_LOOK_S if self._known else None):
                if key.data is None:
                    self._drain_wakes()
                else:
                    worker, what = key.data
                    self._serve(worker, what, mask)
            while self._todo:
                self._guarded(self._todo.popleft())
            if time.monotonic() - looked_at >= _LOOK_S:
                looked_at = time.monotonic()
                self._guarded(self._look_around)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _serve(self, worker: Subscriber, what: str, mask: int) -> None:
        if worker not in self._known:
            return  # it has gone in this very pass
        try:
            if what == "socket" and mask & selectors.EVENT_WRITE and not worker.write():
                self._selector.modify(worker.socket, selectors.EVENT_READ, (worker, "socket"))
            is_there = what == "socket" and (not mask & selectors.EVENT_READ or worker.read() is not False)
        except Exception:
            logger.exception("the messages of a worker process cannot be read")
            is_there = False
        if not is_there:
            self._drop(worker)

    def _look_around(self) -> None:
        for worker in [worker for worker in self._known if worker not in self._pidfds]:
            if not worker.is_running():
                self._drop(worker)
        self._look()

    def _drop(self, worker: Subscriber) -> None:
        self._known.discard(worker)
        with contextlib.suppress(Exception):
            while worker.read():  # what it has said before its end
                pass
        self._selector.unregister(worker.socket)
        opened = self._pidfds.pop(worker, None)
        if opened is not None:
            self._selector.unregister(opened)
            os.close(opened)
        self._guarded(worker.gone)

    @staticmethod
    def _guarded(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:
            logger.exception("the end or the beginning of a worker process could not be handled")


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # only newer Linux has it; elsewhere it is looked at now and then
        return None
