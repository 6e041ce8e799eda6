"""The thread runner: all calls of a session run on one and the same thread; fast sessions share theirs.

A new session is placed by what its environment's calls have shown so far, and never changes its thread:

    nothing known yet     up to `SPREAD` threads, the emptiest first
    steps are fast        one shared thread: few hand-overs, and the interpreter lock changes hands rarely
    some calls are slow   a thread of its own, up to `max_threads`
    in between            spread: a millisecond spent waiting for a disk or an engine would add up on one thread

Knows calls and their duration; must not know sessions or environments.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable
from queue import SimpleQueue

from .base import Lane, LaneCall

logger = logging.getLogger(__name__)

SPREAD = 32
PARKED = 4
SLOW_S = 0.005
"""A mean above this, of any kind of call, is slow."""
FAST_S = 0.0005
"""A mean up to this, of steps and of tool calls, is fast."""
PROOF = 8
"""How many steps must be seen before they count as fast."""
_STEPS = ("step", "tool")
_WEIGHT = 0.1


class CallProfile:
    """The durations of calls so far: a moving mean of each kind."""

    __slots__ = ("_mean_s", "_steps")

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}
        self._steps = 0

    def record(self, kind: str, seconds: float) -> None:
        """Record one call. Races between threads lose a sample, never more."""
        mean = self._mean_s.get(kind)
        self._mean_s[kind] = seconds if mean is None else mean + _WEIGHT * (seconds - mean)
        if kind in _STEPS:
            self._steps += 1

    @property
    def is_slow(self) -> bool:
        """Whether some kind of call takes long enough to delay other sessions on its thread."""
        return any(mean > SLOW_S for mean in self._mean_s.values())

    @property
    def is_fast(self) -> bool:
        """Whether enough steps have been seen, all of them fast, and no other kind of call is slow."""
        if self._steps < PROOF or self.is_slow:
            return False
        return all(self._mean_s.get(kind, 0.0) <= FAST_S for kind in _STEPS)


class WorkerThread:
    """One thread and the calls that wait for it."""

    def __init__(self, name: str, profile: CallProfile) -> None:
        self.sessions = 0
        self._calls: SimpleQueue[LaneCall | None] = SimpleQueue()
        self.submit = self._calls.put  # no method of its own: every step passes here
        self._profile = profile
        self._began: float | None = None
        # A daemon: an environment that hangs must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether the running call takes too long for others to share the thread."""
        began = self._began
        return began is not None and time.perf_counter() - began > SLOW_S

    def stop(self) -> None:
        """End the thread after the calls that are queued."""
        self.submit(None)

    def _run(self) -> None:
        take, record, clock = self._calls.get, self._profile.record, time.perf_counter
        while (call := take()) is not None:
            began = self._began = clock()
            try:
                call.run()
            except BaseException:
                logger.exception("a call raised in its lane")
            self._began = None
            record(call.kind, (clock() - began) / call.count)
            del call  # or an idle thread would keep the last action alive


class ThreadLane(Lane):
    """A session's place on a thread."""

    __slots__ = ("_runner", "_submit", "host")

    def __init__(self, worker: WorkerThread, runner: ThreadRunner) -> None:
        self.host: WorkerThread = worker
        self._runner = runner
        self._submit = worker.submit

    @property
    def is_shared(self) -> bool:
        """Whether other sessions run on the same thread."""
        return self.host.sessions > 1

    def submit(self, call: LaneCall) -> None:
        """Run the call on the thread, after those before it."""
        self._submit(call)

    def release(self) -> None:
        """Leave the thread."""
        self._runner.leave(self.host)


class ThreadRunner:
    """Places sessions on threads.

    Args:
        max_threads: How many threads slow sessions may take; beyond that they share, the emptiest first.
        single_thread: Put every session on one and the same thread.
    """

    name = "thread"

    def __init__(self, *, max_threads: int = 1024, single_thread: bool = False) -> None:
        self.profile = CallProfile()
        self._max_threads = max(1, max_threads)
        self._single: WorkerThread | None = None
        self._single_wanted = single_thread
        self._shared: WorkerThread | None = None
        self._workers: list[WorkerThread] = []
        self._parked: list[WorkerThread] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def threads(self) -> int:
        """Threads alive now."""
        with self._lock:
            return len(self._workers) + len(self._parked)

    def lane(self) -> Lane:
        """Reserve a place."""
        with self._lock:
            worker = self._place()
            worker.sessions += 1
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
        limit = self._max_threads if self.profile.is_slow else min(SPREAD, self._max_threads)
        if len(self._workers) < limit:
            return self._new_worker()
        return self._emptiest(self._workers) or self._new_worker()

    @staticmethod
    def _emptiest(workers: Iterable[WorkerThread]) -> WorkerThread | None:
        return min(workers, key=lambda worker: worker.sessions, default=None)

    def _new_worker(self) -> WorkerThread:
        worker = self._parked.pop() if self._parked else WorkerThread(f"openenv-{next(self._numbers)}", self.profile)
        self._workers.append(worker)
        return worker

    def leave(self, worker: WorkerThread) -> None:
        """Take a session off its thread; a thread without sessions is parked or stopped."""
        with self._lock:
            worker.sessions -= 1
            if worker.sessions or worker is self._single or worker not in self._workers:
                return
            self._workers.remove(worker)
            if worker is self._shared:
                self._shared = None
            if len(self._parked) < PARKED:
                self._parked.append(worker)
                return
        worker.stop()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads; one that is stuck in a call is abandoned when the time is up."""
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
