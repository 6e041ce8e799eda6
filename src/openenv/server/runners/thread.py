"""The thread runner: all calls of a session run on the same thread; fast sessions share a thread.

A new session is placed by the measured durations of calls, and stays on its thread unless a neighbour hangs:

    no calls yet          up to `SPREAD` threads, the emptiest first; fewer if several processes share the sessions
    steps are fast        one shared thread: few hand-overs, and the interpreter lock changes hands rarely
    some calls are slow   a separate thread, up to `max_threads`
    in between            spread: milliseconds of waiting for a disk or an engine would add up on one thread

Results return to the event loop through its `Dispatcher`. Knows calls and their duration; must not know sessions or
environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from .base import Lane, LaneCall

logger = logging.getLogger(__name__)

SPREAD = 32
PARKED = 4
SLOW_S = 0.005
"""A mean duration above this is slow, for any kind of call."""
FAST_S = 0.0005
"""A mean duration up to this is fast, for steps and tool calls."""
PROOF = 8
"""How many steps must be measured before they count as fast."""
_STEPS = ("step", "tool")
_WEIGHT = 0.1
_ATTRIBUTE = "_openenv_objects"

T = TypeVar("T")


class CallProfile:
    """The durations of calls: a moving mean for each kind."""

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
        """Whether some kind of call is slow enough to delay other sessions on its thread."""
        return any(mean > SLOW_S for mean in self._mean_s.values())

    @property
    def is_fast(self) -> bool:
        """Whether enough steps were measured, steps are fast, and all other kinds of calls are not slow."""
        if self._steps < PROOF or self.is_slow:
            return False
        return all(self._mean_s.get(kind, 0.0) <= FAST_S for kind in _STEPS)


class WorkerThread:
    """One thread and its queue of calls."""

    def __init__(self, name: str, profile: CallProfile) -> None:
        self.sessions = 0
        self._calls: SimpleQueue[LaneCall | None] = SimpleQueue()
        self.submit = self._calls.put  # not a method, to save a call in every step
        self._profile = profile
        self._began: float | None = None
        self._call: LaneCall | None = None
        self._name = name
        self._start()

    def _start(self) -> None:
        # A daemon: a hanging environment must not keep the process alive.
        self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self.thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether the running call takes too long for others to share the thread."""
        began = self._began
        return began is not None and time.perf_counter() - began > SLOW_S

    def runs(self, call: object) -> bool:
        """Return whether a call runs now."""
        return self._call is call

    def replace_thread(self) -> None:
        """Let a new thread run the queued calls; the old one ends with its hanging call."""
        self._began = self._call = None
        self._start()

    def stop(self) -> None:
        """End the thread after the queued calls."""
        self.submit(None)

    def _run(self) -> None:
        take, record, clock = self._calls.get, self._profile.record, time.perf_counter
        thread = threading.current_thread()
        while (call := take()) is not None:
            self._call = call
            began = self._began = clock()
            try:
                call.run()
            except BaseException:
                logger.exception("a call raised in its lane")
            if self.thread is not thread:  # replaced: the new thread runs the rest
                return
            self._began = self._call = None
            record(call.kind, (clock() - began) / call.count)
            del call  # an idle thread must not keep the last action alive


class ThreadLane(Lane):
    """A session's place on a thread."""

    __slots__ = ("_has_left", "_keeps_thread", "_runner", "host", "submit")

    def __init__(self, worker: WorkerThread, runner: ThreadRunner) -> None:
        self.host: WorkerThread = worker
        self._runner = runner
        self._has_left = False
        self._keeps_thread = False
        self.submit = worker.submit  # type: ignore[method-assign, assignment]  # saves a call in every step

    @property
    def is_shared(self) -> bool:
        """Whether other sessions run on the same thread."""
        return self.host.sessions > 1

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
        self._spread = spread
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
        """The number of live threads."""
        with self._lock:
            return len(self._workers) + len(self._parked)

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
        limit = self._max_threads if self.profile.is_slow else min(self._spread, self._max_threads)
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


def loop_local(
    loop: asyncio.AbstractEventLoop, kind: Callable[[asyncio.AbstractEventLoop], T], make: Callable[[], T] | None = None
) -> T:
    """Return the loop's object of a kind, made at the first call; it lives as long as the loop."""
    # Stored in an attribute of the loop: a separate table would keep all loops alive.
    objects: dict[Any, Any] | None = getattr(loop, _ATTRIBUTE, None)
    if objects is None:
        objects = {}
        setattr(loop, _ATTRIBUTE, objects)
    instance: T | None = objects.get(kind)
    if instance is None:
        instance = objects[kind] = kind(loop) if make is None else make()
    return instance


class Delivery(Protocol):
    """A result on its way to the loop."""

    def deliver(self) -> None:
        """Deliver the result; called on the loop."""
        ...


class Dispatcher:
    """Delivers results from threads to one event loop; a burst of results costs one wake-up."""

    __slots__ = ("__weakref__", "_due", "_ready", "_scheduled", "_thread", "after_delivery", "is_delivering", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ready: deque[Delivery] = deque()
        self._scheduled = False
        self._due: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._thread = threading.get_ident()
        self.is_delivering = False
        self.after_delivery: Callable[[], None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this dispatcher's loop."""
        return asyncio._get_running_loop() is self.loop

    @property
    def is_at_hand(self) -> bool:
        """Whether the caller may use the loop's objects: the loop runs in the caller's thread."""
        # Every result needs this check. `is_current` would cost a system call, because asyncio compares process ids;
        # that was a tenth of an inline step.
        return self._thread == threading.get_ident() and self.loop.is_running()

    def at_end_of_pass(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call an action after the loop has read all input of this pass; call this in the loop's thread.

        For calls to a thread that several sessions share. If each were handed over separately, each would wake the
        thread, which takes the interpreter from the loop. With 1000 sessions that is a quarter of a step's cost.
        """
        if not self._due:
            self.loop.call_soon(self._act)
        self._due.append((action, arguments))

    def _act(self) -> None:
        due, self._due = self._due, []
        for action, arguments in due:
            try:
                action(*arguments)
            except Exception:
                logger.exception("a call could not be handed over")

    def hand_over(self, delivery: Delivery) -> bool:
        """Deliver at once if the loop is at hand, else soon; return whether it was at once."""
        if self._thread == threading.get_ident() and self.loop.is_running():  # `is_at_hand`, without its call
            delivery.deliver()
            return True
        self.post(delivery)
        return False

    def post(self, delivery: Delivery) -> None:
        """Deliver soon, on the loop; may be called from any thread. A closed loop drops its deliveries."""
        self._ready.append(delivery)
        if not self._scheduled:
            self._scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                self._ready.clear()

    def _drain(self) -> None:
        # Reset the flag before emptying the queue: a thread that appends later schedules another pass.
        self._scheduled = False
        ready = self._ready
        self.is_delivering = True
        for _ in range(len(ready)):
            delivery = ready.popleft()
            try:
                delivery.deliver()
            except Exception:
                logger.exception("a result could not be delivered")
        self.is_delivering = False
        if self.after_delivery is not None:
            self.after_delivery()
        if ready and not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._drain)


def current_dispatcher() -> Dispatcher:
    """Return the dispatcher of the running loop."""
    loop = asyncio.get_running_loop()
    dispatcher = loop_local(loop, Dispatcher)
    dispatcher._thread = threading.get_ident()  # a loop may run again, in another thread
    return dispatcher
