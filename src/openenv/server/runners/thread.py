"""The thread runner: all calls of a session run on the same thread; fast sessions share a thread.

A new session is placed by the measured durations of calls, and stays on its thread unless a neighbour hangs:

    no steps yet          up to `SPREAD` threads, the emptiest first; fewer if several processes share the sessions,
                          or if constructors and resets are quick and there are few sessions
    steps are fast        one shared thread: few hand-overs, and the interpreter lock changes hands rarely
    some calls are slow   a separate thread, up to `max_threads`
    in between            spread: milliseconds of waiting for a disk or an engine would add up on one thread

Threads whose running call blocks get no new sessions, unless all `max_threads` are blocked.

`dispatcher` brings calls to the threads and results back. Knows threads, and how long their calls take; must not know
sessions or environments.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterable
from typing import Final

from .base import Lane
from .dispatcher import CallProfile, HandoverCounts, WorkerThread

logger = logging.getLogger(__name__)

SPREAD = 32
QUICK_SPREAD = 16
_QUICK_SESSIONS: Final = 4  # on each thread, before there are more than `QUICK_SPREAD`
_BLOCKED_S: Final = 0.1  # no new session is placed behind a call that has run for longer: it may never return
PARKED = 4
_SWITCH_S: Final = 0.0005


class ThreadLane(Lane):
    """A session's place on a thread."""

    __slots__ = ("_has_left", "_keeps_thread", "_runner", "host", "submit")

    def __init__(self, worker: WorkerThread, runner: ThreadRunner) -> None:
        self.host: WorkerThread = worker
        self._runner = runner
        self._has_left = False
        self._keeps_thread = False
        self.submit = worker.submit  # type: ignore[method-assign]  # saves a call in every step

    def make_way(self, call: object) -> None:
        """Move the other sessions of the thread to a new one, if the call still runs."""
        self._runner.make_way(self.host, call)

    def abandon(self, call: object) -> None:
        """Leave the thread to the hanging call, and move the other sessions to a new thread."""
        if not self._has_left:
            self._has_left = True
            self._keeps_thread = self._runner.leave_hanging(self.host, call)

    def release(self) -> None:
        """Leave the thread."""
        if self._keeps_thread:
            self.host.stop()
        elif not self._has_left:
            self._has_left = True
            self._runner.leave(self.host)


class ThreadRunner:
    """Places sessions on threads.

    Args:
        max_threads: The most threads for slow sessions; more sessions share threads, the emptiest first.
        spread: The number of threads to use before call durations are known.
        single_thread: Put all sessions on the same thread.
    """

    name = "thread"

    def __init__(self, *, max_threads: int = 1024, spread: int = SPREAD, single_thread: bool = False) -> None:
        self.profile = CallProfile()
        self.handovers = HandoverCounts()
        self._spread = spread
        self._max_threads = max(1, max_threads)
        self._single: WorkerThread | None = None
        self._single_wanted = single_thread
        self._shared: WorkerThread | None = None
        self._workers: list[WorkerThread] = []
        self._parked: list[WorkerThread] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # Python lets a computing thread run for 5 ms before others get the interpreter. The loop needs it for each
        # message that it reads, so one such thread would slow all sessions down. A smaller value of the user's stays.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))

    @property
    def threads(self) -> int:
        """The number of live threads."""
        with self._lock:
            return len(self._workers) + len(self._parked)

    @property
    def placement(self) -> str:
        """Where the next session runs: `one thread` for all, a thread `shared` by fast sessions, `spread`, or `own`."""
        if self._single_wanted:
            return "one thread"
        if self.profile.is_fast:
            return "shared"
        return "own" if self.profile.is_slow else "spread"

    def lane(self) -> Lane:
        """Reserve a place."""
        with self._lock:
            worker = self._place()
            worker.sessions += 1
        return ThreadLane(worker, self)

    def adopt(self, worker: WorkerThread) -> Lane:
        """Take over the thread that a copied process has inherited."""
        with self._lock:
            worker.sessions = 1
            self._workers.append(worker)
        return ThreadLane(worker, self)

    def pin(self, lane: Lane) -> None:
        """Put every later session on this lane's thread."""
        assert isinstance(lane, ThreadLane)
        with self._lock:
            self._single = lane.host
            self._single_wanted = True

    def _place(self) -> WorkerThread:
        if self._single_wanted:
            if self._single is None:
                self._single = self._new_worker()
            return self._single
        if self.profile.is_fast:
            if self._shared is None or self._shared.is_stuck:
                free = [worker for worker in self._workers if not worker.is_stuck]
                self._shared = self._emptiest(free) or self._new_worker()
            return self._shared
        limit = min(self._spread, self._max_threads)
        if self.profile.is_slow:
            limit = self._max_threads
        elif self.profile.begins_quickly:  # then steps are probably quick, and each further thread makes them slower
            sessions = sum(worker.sessions for worker in self._workers)
            limit = min(limit, max(QUICK_SPREAD, sessions // _QUICK_SESSIONS))
        free = [worker for worker in self._workers if not worker.runs_for(_BLOCKED_S)]
        if len(free) < limit and len(self._workers) < self._max_threads:
            return self._new_worker()
        return self._emptiest(free or self._workers) or self._new_worker()

    @staticmethod
    def _emptiest(workers: Iterable[WorkerThread]) -> WorkerThread | None:
        return min(workers, key=lambda worker: worker.sessions, default=None)

    def _new_worker(self) -> WorkerThread:
        if self._parked:
            worker = self._parked.pop()
        else:
            worker = WorkerThread(f"openenv-{next(self._numbers)}", self.profile, self.handovers)
        self._workers.append(worker)
        return worker

    def leave(self, worker: WorkerThread) -> None:
        """Remove a session from its thread; park or stop a thread without sessions."""
        with self._lock:
            worker.sessions -= 1
            if worker.sessions or worker is self._single or worker not in self._workers:
                return
            self._forget(worker)
            if len(self._parked) < PARKED:
                self._parked.append(worker)
                return
        worker.stop()

    def leave_hanging(self, worker: WorkerThread, call: object) -> bool:
        """Remove a session with an abandoned last call from its thread.

        Returns:
            Whether the session keeps the thread, because it was alone there and the call still runs.
        """
        with self._lock:
            is_alone = worker.sessions == 1 and worker is not self._single and worker in self._workers
            if is_alone and worker.runs(call):
                worker.sessions = 0
                self._forget(worker)
                return True
            if worker.runs(call):
                worker.replace_thread()
        self.leave(worker)
        return False

    def _forget(self, worker: WorkerThread) -> None:
        self._workers.remove(worker)
        if worker is self._shared:
            self._shared = None

    def make_way(self, worker: WorkerThread, call: object) -> None:
        """Give the other sessions of a thread a new one while a call hangs, unless all need the same thread."""
        with self._lock:
            if worker.sessions > 1 and worker is not self._single and worker.runs(call):
                logger.warning("thread %s hangs in close(); its other sessions get a new one", worker.thread.name)
                worker.replace_thread()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads; abandon a stuck one when the time is up."""
        with self._lock:
            workers = [*self._workers, *self._parked]
            self._workers, self._parked = [], []
            self._single = self._shared = None
        for worker in workers:
            worker.stop()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            if worker.thread is threading.current_thread():
                continue
            with contextlib.suppress(RuntimeError):
                worker.thread.join(max(0.0, deadline - time.monotonic()))
            if worker.thread.is_alive():
                logger.warning("thread %s is stuck in an environment's call and was left behind", worker.thread.name)
