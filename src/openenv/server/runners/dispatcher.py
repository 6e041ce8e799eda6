"""The threads of an event loop's sessions, and the way between both: calls go there, results come back.

    loop ── calls of one pass ──> WorkerThread          one hand-over per thread and pass
      │                                │
      waits, at most `WAIT_S`          runs them, at most for `TURN_S`; the rest in its next turn
      │                                │
      delivers, writes  <── results ───┘                one wake-up for all

Only one of the two runs at a time, so they do not compete for the interpreter lock: a turn costs two changes of
threads, and while the loop waits, more requests arrive for the next turn. They sleep on one core (`SharedCore`). If a
call blocks, the loop goes on. Then results wake it, and it does not wait for that thread for some passes. Knows calls
and threads; must not know sessions or environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Literal, Protocol, TypeVar

from .base import LaneCall, has_affinity

logger = logging.getLogger(__name__)

WAIT_S: Final = 0.001
"""How long the loop waits for calls: so much can a slow step delay the sessions of other threads."""
TURN_S: Final = 0.003
"""How long a thread runs calls before the loop sends their replies, so that the clients can go on."""
SLOW_S = 0.005
"""A mean duration above this is slow, for any kind of call."""
FAST_S = 0.0005
"""A mean duration up to this is fast, for steps and tool calls."""
PROOF = 8
"""How many steps must be measured before they count as fast."""
_STEPS = ("step", "tool")
_OTHER = {"step": "tool", "tool": "step"}
_WEIGHT = 0.1
_MOST_WAITS: Final = 5
SHARED_FROM: Final = 8
"""From so many steps on, a pass of one thread shares a core. A few are answered sooner with two cores awake."""
KEEP_CORE_S: Final = 0.1
"""How long a loop and its threads stay on a core before they may choose another one."""
_MOST_MISSES: Final = 8
_ATTRIBUTE = "_openenv_objects"

T = TypeVar("T")


def _core_reader() -> Callable[[], int] | None:
    """Return a function that returns the core of the calling thread, if the system can pin threads to cores."""
    if not has_affinity():
        return None
    try:
        # `PyDLL` keeps the interpreter lock; giving it up and taking it again costs more than the call.
        reader = ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):  # another C library
        return None
    reader.argtypes, reader.restype = (), ctypes.c_int
    return reader


class SharedCore:
    """The core on which a loop and its threads wake each other, while the loop waits for their turns.

    The scheduler would wake each of them on another idle core, without the data of the one before in its cache: with
    64 sessions on 32 threads, that made a step on eight cores three times as expensive as on one. Only one of them runs
    at a time, so one core is enough:

        loop      reads -> pinned, sleeps --------------------------> all cores: delivers, writes
        thread    pinned, sleeps -> all cores: runs calls -> pinned, wakes the next, sleeps

    Environment code never runs pinned: its threads and processes inherit all cores, a long step can move to another
    one, and so can the loop. Does nothing if the process may use only one core, or if the system cannot pin threads.
    """

    __slots__ = ("_chosen_at", "_core", "_read_core", "_wanted", "cores")

    def __init__(self) -> None:
        self.cores: set[int] | None = None
        """The cores that the process may use, while the loop waits for a pass that shares one; else None."""
        self._core = -1
        self._wanted = {-1}
        self._chosen_at = -math.inf
        self._read_core = _core_reader()

    def gather(self) -> None:
        """Pin the loop's thread, which goes to sleep."""
        if self._read_core is None:
            return
        cores = os.sched_getaffinity(0)
        if len(cores) == 1:
            return
        # Every move costs each thread a migration, so a core is kept for a while, but not for long: another process
        # may need it.
        now = time.perf_counter()
        if now - self._chosen_at > KEEP_CORE_S or self._core not in cores:
            self._chosen_at = now
            self._core = self._read_core()
            self._wanted = {self._core}
        self.cores = cores
        self.pin()

    def pin(self) -> None:
        """Pin the calling thread, which goes to sleep."""
        try:
            os.sched_setaffinity(0, self._wanted)
        except (OSError, ValueError):  # not permitted, or the core was taken away: from now on the system decides
            self._read_core = None

    def leave(self) -> None:
        """Let the loop's thread use all cores again."""
        cores, self.cores = self.cores, None
        # Not if somebody has moved the thread meanwhile (`taskset`); the same core twice cannot be told apart.
        if cores is not None and os.sched_getaffinity(0) == self._wanted:
            unpin(cores)


def unpin(cores: Iterable[int]) -> None:
    """Let the calling thread use these cores."""
    with contextlib.suppress(OSError):  # all of them were taken away; the system has chosen others
        os.sched_setaffinity(0, cores)


class CallProfile:
    """The durations of calls: a moving mean for each kind."""

    __slots__ = ("_mean_s", "_steps", "step_s")

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}
        self._steps = 0
        self.step_s = 0.0
        """The mean duration of a step or tool call, the longer one; 0 before the first."""

    def record(self, kind: str, seconds: float, calls: int = 1) -> None:
        """Record calls of one kind and their mean duration. Races between threads lose a sample, never more."""
        means = self._mean_s
        mean = means.get(kind)
        weight = _WEIGHT if calls == 1 else 1.0 - (1.0 - _WEIGHT) ** calls
        means[kind] = mean = seconds if mean is None else mean + weight * (seconds - mean)
        if kind in _STEPS:
            self._steps += calls
            other = means.get(_OTHER[kind], 0.0)
            self.step_s = mean if mean > other else other

    def is_expected_to_last(self, call: LaneCall) -> bool:
        """Whether a call, or those after it, probably take so long that the loop should not wait for them."""
        # Of an unknown class, only the constructor: it may load a model.
        mean = self._mean_s.get(call.kind, math.inf if call.kind == "construct" else 0.0)
        return call.count * self.step_s > WAIT_S or mean > SLOW_S

    @property
    def begins_quickly(self) -> bool:
        """Whether environments are built, and reset as far as is known, in the time of a fast step."""
        means = self._mean_s
        return means.get("construct", math.inf) <= FAST_S and means.get("reset", 0.0) <= FAST_S

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


@dataclass(slots=True)
class HandoverCounts:
    """How the loop handed calls to threads: counted for each thread and pass. Races lose a count, never more.

    Args:
        quick: The loop waited, and the calls had run in time.
        late: The loop waited, but went on without the results.
        apart: The loop did not wait, because the calls were expected to be slow.
    """

    quick: int = 0
    late: int = 0
    apart: int = 0


class WorkerThread:
    """One thread and its queue of calls."""

    def __init__(self, name: str, profile: CallProfile, counts: HandoverCounts) -> None:
        self.sessions = 0
        self.profile = profile
        self._counts = counts
        self.calls: deque[LaneCall] = deque()
        self._wakes: SimpleQueue[ThreadTurn | Literal[False] | None] = SimpleQueue()  # False ends the thread
        self._began: float | None = None
        self._call: LaneCall | None = None
        self._misses = 0
        self._passes_without_wait = 0
        self._pinned_from: set[int] | None = None  # the cores of the pinned thread before
        self._name = name
        self._start()

    def _start(self) -> None:
        self._pinned_from = None
        # A daemon: a hanging environment must not keep the process alive.
        self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self.thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether the running call takes too long for others to share the thread."""
        return self.runs_for(SLOW_S)

    def runs_for(self, seconds: float) -> bool:
        """Whether the running call takes longer than this."""
        began = self._began
        return began is not None and time.perf_counter() - began > seconds

    def runs(self, call: object) -> bool:
        """Return whether a call runs now."""
        return self._call is call

    # -- calls ----------------------------------------------------------------------------------------------------

    def submit(self, call: LaneCall, dispatcher: Dispatcher | None = None) -> None:
        """Queue a call, at the end of the loop's pass if its dispatcher is given."""
        if dispatcher is not None and dispatcher.hand_out(self, call):
            return
        if threading.get_ident() == self.thread.ident:  # a running call submits the next one, which needs no wake-up
            self.calls.append(call)
        else:
            self.put((call,))

    def put(self, calls: Iterable[LaneCall], turn: ThreadTurn | None = None) -> None:
        """Queue calls now; run them within a turn, if the loop waits for it."""
        self.calls.extend(calls)
        self._wakes.put(turn)

    def is_awaited(self, calls: Sequence[LaneCall]) -> bool:
        """Whether the loop should wait for calls: they are expected to be quick."""
        if self._passes_without_wait:
            self._passes_without_wait -= 1
        elif self._began is None and (not calls or not self.profile.is_expected_to_last(calls[0])):
            return True
        self._counts.apart += 1
        return False

    def waited_for(self, *, is_late: bool) -> None:
        """Record a wait of the loop. If a call blocks the thread, the loop does not wait for it in the next passes."""
        if not is_late:
            self._counts.quick += 1
            if self._misses:
                self._misses >>= 1
            return
        self._counts.late += 1
        if self.runs_for(WAIT_S):  # not only a busy machine
            self._misses = min(self._misses + 1, _MOST_MISSES)
            self._passes_without_wait = 1 << self._misses

    def replace_thread(self) -> None:
        """Let a new thread run the queued calls; the old one ends with its hanging call."""
        self._began = self._call = None
        self._start()
        self._wakes.put(None)

    def stop(self) -> None:
        """End the thread after the queued calls."""
        self._wakes.put(False)

    def _run(self) -> None:
        while True:
            turn = self._wakes.get()
            if not self._run_calls(turn or None) or turn is False:
                return
            del turn  # it has the calls; an idle thread must not keep the last action alive

    def _run_calls(self, turn: ThreadTurn | None) -> bool:
        """Run the queued calls, or as many as a turn has time for; return False if a new thread runs the rest."""
        calls, record, clock = self.calls, self.profile.record, time.perf_counter
        thread = threading.current_thread()
        if self._pinned_from is not None:
            unpin(self._pinned_from)
            self._pinned_from = None
        now = began = clock()
        ends_at = now + TURN_S if turn else math.inf
        # Quick calls of one kind are recorded together: one by one, that would be a tenth of the thread's work.
        kind, count = "", 0
        while calls:
            call = self._call = calls.popleft()
            self._began = now
            if call.kind != kind:
                if count:
                    record(kind, (now - began) / count, count)
                kind, count, began = call.kind, 0, now
            count += call.count
            try:
                call.run()
            except BaseException:
                logger.exception("a call raised in its lane")
            if self.thread is not thread:
                return False
            now = clock()
            if now - began > FAST_S:
                record(kind, (now - began) / count, count)
                count, began = 0, now
            if now >= ends_at:  # the loop comes back for the rest, unless it does not wait any more
                break
        if count:
            record(kind, (now - began) / count, count)
        self._began = self._call = None
        return turn is None or self._end_turn(turn)

    def _end_turn(self, turn: ThreadTurn) -> bool:
        """Wake the loop or the next thread; run the rest of the calls if the loop has not waited."""
        cores = turn.core.cores
        if cores is not None:  # before it wakes anybody: the system must not move this thread first
            self._pinned_from = cores
            turn.core.pin()
        return turn.end() or not self.calls or self._run_calls(None)


class ThreadTurn:
    """The time of one thread, for which the loop waits. It ends once: the thread ends it, or the loop gives it up.

    Turns begin one after the other, because threads that wake together compete for the interpreter lock.

    Args:
        worker: The thread.
        calls: What it runs.
        following: The turns that have not begun; all turns of a pass share this queue.
        core: Where the thread sleeps afterwards.
    """

    __slots__ = ("_calls", "_claim", "_ended", "_following", "core", "worker")

    def __init__(
        self, worker: WorkerThread, calls: list[LaneCall], following: deque[ThreadTurn], core: SharedCore
    ) -> None:
        self.worker = worker
        self.core = core
        self._calls = calls
        self._following = following
        self._claim = [None]  # whoever removes the item decides; `pop` is atomic
        self._ended = threading.Lock()
        self._ended.acquire()

    def begin(self) -> None:
        """Let the thread begin."""
        self.worker.put(self._calls, self)

    def end(self) -> bool:
        """Let the next thread or the loop continue; return False if the loop does not wait. Called by the thread."""
        if not self.give_up():
            return False
        self._ended.release()
        if self._following:
            begin_next(self._following)
        return True

    # Each step of one session comes here, so the list is tested before it is popped: an exception costs as much as all
    # the rest. Another thread may still be faster.
    def give_up(self) -> bool:
        """Stop waiting; return False if the thread has ended its turn. Called by the loop."""
        if not self._claim:
            return False
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until the thread has ended its turn; return False when the time is up. Called by the loop."""
        return self._ended.acquire(timeout=seconds)


def begin_next(following: deque[ThreadTurn]) -> bool:
    """Let the next thread begin; return False after the last."""
    try:
        turn = following.popleft()
    except IndexError:  # another thread was faster
        return False
    turn.begin()
    return True


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
    """Hands the calls of one event loop to threads, and delivers their results to it."""

    __slots__ = (
        "__weakref__", "_core", "_is_waiting", "_outgoing", "_ready", "_scheduled", "_thread", "after_delivery",
        "is_delivering", "loop",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ready: deque[Delivery] = deque()
        self._scheduled = False
        self._outgoing: dict[WorkerThread, list[LaneCall]] = {}  # handed over at the end of this pass
        self._is_waiting = False
        self._thread = threading.get_ident()
        self._core = SharedCore()
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

    # -- to the threads -------------------------------------------------------------------------------------------

    def hand_out(self, worker: WorkerThread, call: LaneCall) -> bool:
        """Hand a call to a thread after the loop has read all input of this pass; return False in another thread.

        If each were handed over separately, each would wake the thread, which takes the interpreter from the loop.
        With 1000 sessions that is a quarter of a step's cost.
        """
        if self._thread != threading.get_ident() or not self.loop.is_running():  # `is_at_hand`, without its call
            return False
        calls = self._outgoing.get(worker)
        if calls is None:
            calls = self._schedule(worker)
        calls.append(call)
        return True

    def _hand_out(self) -> None:
        """Hand over the calls of this pass, and wait for the threads that will be quick."""
        outgoing, self._outgoing = self._outgoing, {}
        turns: list[ThreadTurn] = []
        following: deque[ThreadTurn] = deque()
        for worker, calls in outgoing.items():
            if worker.is_awaited(calls):
                turns.append(ThreadTurn(worker, calls, following, self._core))
            else:
                worker.put(calls)
        if not turns:
            return
        following.extend(turns[1:])
        first = outgoing[turns[0].worker]
        if len(turns) > 1 or not first or len(first) * first[0].count >= SHARED_FROM:
            self._core.gather()
        self._is_waiting = True  # from here on, results do not wake the loop
        try:
            turns[0].begin()
            late = self._wait_for(turns, following)
        finally:
            self._is_waiting = False
            self._core.leave()
        for turn in turns:
            worker, is_late = turn.worker, turn in late and turn.give_up()
            worker.waited_for(is_late=is_late)
            if worker.calls and not is_late:  # its turn was too short for all
                self._schedule(worker)
        self._drain()

    @staticmethod
    def _wait_for(turns: list[ThreadTurn], following: deque[ThreadTurn]) -> Sequence[ThreadTurn]:
        """Wait until turns have ended, unless a call takes too long; return the others."""
        unended = turns
        for _ in range(_MOST_WAITS):
            # Usually the last one ends last.
            if unended[-1].wait(WAIT_S):
                unended = [turn for turn in unended[:-1] if not turn.wait(0)]
                if not unended:
                    return ()
            while following and begin_next(following):  # one takes too long: all others begin
                pass
            if any(turn.worker.runs_for(WAIT_S) for turn in unended):
                break
        return unended

    def _schedule(self, worker: WorkerThread) -> list[LaneCall]:
        """Give a thread a turn in the next pass; return the list of its new calls."""
        if not self._outgoing:
            self.loop.call_soon(self._hand_out)
        return self._outgoing.setdefault(worker, [])

    # -- to the loop ----------------------------------------------------------------------------------------------

    def hand_over(self, delivery: Delivery) -> bool:
        """Deliver at once if the loop is at hand, else soon; return False if the loop does other work until then."""
        if self._thread == threading.get_ident() and self.loop.is_running():  # `is_at_hand`, without its call
            delivery.deliver()
            return True
        self._ready.append(delivery)
        # The loop looks for results after it has reset `_is_waiting`, so none is left behind.
        if self._is_waiting:
            return True
        if not self._scheduled:
            self._wake()
        return False

    def post(self, delivery: Delivery) -> None:
        """Deliver soon, on the loop; may be called from any thread. A closed loop drops its deliveries."""
        self._ready.append(delivery)
        if not (self._scheduled or self._is_waiting):
            self._wake()

    def _wake(self) -> None:
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
