"""The process runner: environments in worker processes, so that a crash takes only the sessions of one of them.

Sessions are spread over a number of processes, the emptiest first; a process that has died is replaced. Knows workers
and lanes; must not know sessions or environments.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ...env.binding import Encoder
from ...env.tools.source import ToolEvents
from ...errors import SessionLost, message_of
from ..base import WORKER_CRASHED, Lane, LaneCall, NotSendable, ProcessOptions, RemoteLane
from ..dispatch import current_dispatcher
from .messages import MessageKind, WorkerSetup, modules_of, pack, pack_factory
from .stub import EnvironmentStub
from .worker import AwaitedReply, BlockingReply, PendingReply, SocketThread, WorkerGone, WorkerProcess

# crew: Threads for calls that wait: one each, kept for a while for the next one. Knows callables only.


logger = logging.getLogger(__name__)

_KEPT_S = 5.0


class ThreadPool:
    """Runs each call at once, in a thread that has nothing to do or in a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._idle = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self, call: Callable[[], None]) -> None:
        """Run a call."""
        with self._lock:
            has_idle = self._idle > 0
            if has_idle:
                self._idle -= 1
        if has_idle:
            self._calls.put(call)
        else:
            # Daemons: a worker that does not answer must not keep the server from ending.
            name = f"{self._name}-{next(self._numbers)}"
            threading.Thread(target=self._work, args=(call,), name=name, daemon=True).start()

    def _work(self, call: Callable[[], None]) -> None:
        while True:
            try:
                call()
            except BaseException:
                logger.exception("a call broke its promise not to raise")
            del call
            with self._lock:
                self._idle += 1
            try:
                call = self._calls.get(timeout=_KEPT_S)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                call = self._calls.get()  # somebody has just counted on this thread


# lane: A session's place in a worker: the lane that the session has here, and the way to its environment there.
#
# Knows workers and stand-ins; must not know how workers are chosen.


class WorkerDied(RuntimeError):
    """The worker process died while it built an environment."""


class Placer(Protocol):
    """Whoever hands out lanes."""

    crew: ThreadPool
    single_thread: bool

    def start(self, worker: WorkerProcess) -> None:
        """Start a worker, unless it runs."""
        ...

    def encoder(self, encode: Encoder) -> tuple[int, bytes] | None:
        """Return an encoder's number and parcel; None where it cannot be sent."""
        ...

    def leave(self, lane: ProcessLane) -> None:
        """Take a lane back."""
        ...


class ProcessLane(RemoteLane):
    """A place in a worker. Calls of the session that cannot be awaited run in a thread here, and wait."""

    is_shared = False

    def __init__(self, placer: Placer, worker: WorkerProcess, number: int) -> None:
        self.worker = worker
        self.number = number
        self.on_lost: Callable[[str], None] = _nobody_told
        self.ending_since: float | None = None
        self._placer = placer
        self._lock = threading.Lock()
        self._is_built = False
        self._is_lost = False

    @property
    def host(self) -> ProcessLane:
        """Nothing is shared."""
        return self

    def submit(self, call: LaneCall) -> None:
        """Run a call in a thread; a session submits one at a time."""
        self._placer.crew.run(call.run)

    def release(self) -> None:
        """Leave the worker."""
        self._placer.leave(self)

    def ending(self) -> None:
        """Take note that the session is to end."""
        self.ending_since = time.monotonic()

    # -- the environment ------------------------------------------------------------------------------------------

    def construct(self) -> EnvironmentStub:
        """Build the environment there, and return what stands for it here.

        Raises:
            WorkerDied: The process has died meanwhile.
            WorkersKeepDying: It is not started, since others have died too soon.
            BaseException: What the constructor has raised.
        """
        waiter = BlockingReply()
        try:
            self._placer.start(self.worker)
            self.worker.request(MessageKind.OPEN, pack((self.number, self._placer.single_thread)), waiter)
            description = waiter.wait()
        except (WorkerGone, SessionLost):
            raise self._died() from None
        with self._lock:
            self._is_built = not self._is_lost
        if not self._is_built:
            raise self._died()
        return EnvironmentStub(self, description)

    def _died(self) -> BaseException:
        return self.worker.failure or WorkerDied(
            f"its worker process died while the environment was built ({self.worker.how})"
        )

    def lose(self) -> None:
        """Take note that the process is gone; whoever builds in it is told by the failure."""
        with self._lock:
            self._is_lost = True
            is_built = self._is_built
        if is_built:
            self.on_lost(WORKER_CRASHED)

    async def ask(
        self, name: str, argument: Any, *, encode: Encoder | None = None, events: ToolEvents | None = None
    ) -> Any:
        """Ask for something and wait, on the event loop.

        Raises:
            SessionLost: The process is gone.
        """
        waiter = AwaitedReply(current_dispatcher(), events)
        sent = None if encode is None else self._placer.encoder(encode)
        number = self._request(name, argument, waiter, sent)
        result = await waiter.wait(partial(self.worker.cancel, number, self.number))
        return result if encode is None or sent is not None else encode(result)

    def ask_blocking(self, name: str, argument: Any) -> Any:
        """Ask for something and wait, in this thread; raises as `ask` does."""
        waiter = BlockingReply()
        self._request(name, argument, waiter, None)
        return waiter.wait()

    def _request(self, name: str, argument: Any, waiter: PendingReply, encoder: tuple[int, bytes] | None) -> int:
        if encoder is not None:
            self.worker.tell_encoder(*encoder)
        asked = (self.number, name, 0 if encoder is None else encoder[0], argument, waiter.events is not None)
        try:
            payload = pack(asked)
        except Exception as exc:
            raise NotSendable(f"the argument of {name} cannot be sent to a worker process: {message_of(exc)}") from exc
        try:
            return self.worker.request(MessageKind.ASK, payload, waiter)
        except WorkerGone:
            raise SessionLost(WORKER_CRASHED) from None

    async def close(self) -> None:
        """Have the environment closed; one that is lost is closed."""
        waiter = AwaitedReply(current_dispatcher())
        try:
            number = self.worker.request(MessageKind.CLOSE, pack(self.number), waiter)
            await waiter.wait(partial(self.worker.cancel, number, self.number))
        except (WorkerGone, SessionLost):
            return


def _nobody_told(reason: str) -> None:
    """Until a session has the lane, there is nobody to tell."""


# damping: When to start another worker after some have died for nothing. Knows times and numbers only.


PATIENCE = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class WorkersKeepDying(RuntimeError):
    """No worker is started for a while, since the last ones have died before they did anything."""


class StartBackoff:
    """Counts the deaths of workers that have answered nothing; after some in a row, pauses grow.

    Args:
        clock: Tells the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._deaths = 0
        self._until = 0.0
        self._last = ""

    def answered(self) -> None:
        """Take note that a worker has done something useful."""
        if self._deaths:
            with self._lock:
                self._deaths = 0

    def died(self, how: str) -> None:
        """Take note that a worker has died without that."""
        with self._lock:
            self._deaths += 1
            self._last = how
            if self._deaths >= PATIENCE:
                pause = FIRST_PAUSE_S * 2 ** min(self._deaths - PATIENCE, 10)
                self._until = self._clock() + min(pause, LONGEST_PAUSE_S)

    def check(self) -> None:
        """Let a worker be started, or not.

        Raises:
            WorkersKeepDying: Not now.
        """
        with self._lock:
            left = self._until - self._clock()
            if self._deaths >= PATIENCE and left > 0:
                raise WorkersKeepDying(
                    f"the last {self._deaths} worker processes died before they answered anything (the last one: "
                    f"{self._last}); the next one is started in {left:.1f} s"
                )


_LOGGERS = ("", "openenv")


@dataclass(eq=False, slots=True)
class _WorkerLanes:
    """A worker and the lanes in it."""

    worker: WorkerProcess
    lanes: set[ProcessLane]


class ProcessRunner:
    """Places sessions in worker processes.

    Args:
        factory: Makes an environment; sent to the workers.
        options: How many processes, and how many sessions in each.
        single_thread: Put all sessions of a process on one and the same thread there.

    Raises:
        NotSendable: The factory cannot be sent.
        RuntimeError: The platform has no Unix sockets.
    """

    name = "process"

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        options: ProcessOptions | None = None,
        single_thread: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if sys.platform == "win32":
            raise RuntimeError("the process runner needs a POSIX system")
        self.options = options or ProcessOptions()
        self.single_thread = single_thread
        self.crew = ThreadPool("openenv-waiting")
        self._factory = factory
        self._parcel = pack_factory(factory)
        self._files, self._main = modules_of(factory, self.options.models)
        self._processes = self.options.processes or _cores()
        self._clock = clock
        self._damping = StartBackoff(clock)
        self._lock = threading.Lock()
        self._seats: list[_WorkerLanes] = []
        self._numbers = itertools.count(1)
        self._encoder_numbers = itertools.count(1)
        self._encoders: dict[Encoder, tuple[int, bytes] | None] = {}
        self._switchboard: SocketThread | None = None
        self._is_closing = False

    @property
    def workers(self) -> list[WorkerProcess]:
        """The workers that there are now."""
        with self._lock:
            return [seats.worker for seats in self._seats]

    # -- placing --------------------------------------------------------------------------------------------------

    def lane(self) -> Lane:
        """Reserve a place."""
        with self._lock:
            seats = self._place()
            lane = ProcessLane(self, seats.worker, next(self._numbers))
            seats.lanes.add(lane)
        return lane

    def pin(self, lane: Lane) -> None:
        """Put all later sessions of a process on one thread there."""
        self.single_thread = True

    def _place(self) -> _WorkerLanes:
        most = self.options.sessions_each
        open_to = [
            seats
            for seats in self._seats
            if not (seats.worker.is_gone or seats.worker.is_leaving or self._is_stuck(seats))
            and (most is None or len(seats.lanes) < most)
        ]
        emptiest = min(open_to, key=lambda seats: len(seats.lanes), default=None)
        if emptiest is None or (emptiest.lanes and len(self._seats) < self._processes):
            return self._new_seats()
        return emptiest

    def _new_seats(self) -> _WorkerLanes:
        if self._switchboard is None:
            self._switchboard = SocketThread(self._look)
        worker = WorkerProcess(self._switchboard, on_gone=self._gone, on_answer=self._damping.answered)
        seats = _WorkerLanes(worker, set())
        self._seats.append(seats)
        return seats

    def start(self, worker: WorkerProcess) -> None:
        """Start a worker, unless it runs.

        Raises:
            WorkersKeepDying: Not now: others have died too soon.
            WorkerGone: It was given up before it was started.
        """
        with worker.starting:
            if worker.is_started:
                return
            if worker.is_gone:
                raise WorkerGone
            try:
                self._damping.check()
                worker.start(self._setup())
            except BaseException as exc:
                worker.how = message_of(exc)
                worker.take_pending()
                self._forget(worker)
                raise

    def _setup(self) -> WorkerSetup:
        levels = {name: logging.getLogger(name or None).getEffectiveLevel() for name in _LOGGERS}
        return WorkerSetup(list(sys.path), self._files, self._main, self._parcel, os.getpid(), levels)

    def encoder(self, encode: Encoder) -> tuple[int, bytes] | None:
        """Return an encoder's number and parcel; None where it cannot be sent."""
        try:
            return self._encoders[encode]
        except KeyError:
            pass
        try:
            found = (next(self._encoder_numbers), pack(encode))
        except Exception:
            found = None
        return self._encoders.setdefault(encode, found)

    def leave(self, lane: ProcessLane) -> None:
        """Take a lane back; a worker that is one too many ends with its last one."""
        with self._lock:
            seats = self._seats_of(lane.worker)
            if seats is None:
                return
            seats.lanes.discard(lane)
            is_spare = not seats.lanes and (len(self._seats) > self._processes or not seats.worker.is_started)
            if is_spare:
                self._seats.remove(seats)
        if is_spare:
            seats.worker.leave()

    def _seats_of(self, worker: WorkerProcess) -> _WorkerLanes | None:
        return next((seats for seats in self._seats if seats.worker is worker), None)

    def _forget(self, worker: WorkerProcess) -> set[ProcessLane]:
        with self._lock:
            seats = self._seats_of(worker)
            if seats is None:
                return set()
            self._seats.remove(seats)
            return seats.lanes

    # -- watching, in the switchboard's thread --------------------------------------------------------------------

    def _gone(self, worker: WorkerProcess) -> None:
        pending = worker.take_pending()
        lanes = self._forget(worker)
        is_crash = not (worker.is_leaving or self._is_closing)
        if is_crash:
            what = f"could not start: {worker.failure}" if worker.failure is not None else f"died ({worker.how})"
            logger.error("worker process %d %s; %d session(s) are lost with it", worker.pid, what, len(lanes))
            if not worker.has_answered:
                self._damping.died(str(worker.failure or worker.how))
        for waiter in pending:
            waiter.resolve(None, SessionLost(WORKER_CRASHED))
        for lane in lanes:
            lane.lose()
        if is_crash and worker.has_answered:
            self._replace()

    def _replace(self) -> None:
        """Have another process ready before somebody has to wait for it."""
        with self._lock:
            if self._is_closing or len(self._seats) >= self._processes:
                return
            worker = self._new_seats().worker
        self.crew.run(partial(self._start_spare, worker))

    def _start_spare(self, worker: WorkerProcess) -> None:
        try:
            self.start(worker)
        except (WorkersKeepDying, WorkerGone):
            return
        except OSError:
            logger.exception("a worker process could not be replaced")

    def _is_stuck(self, seats: _WorkerLanes) -> bool:
        """Whether every session of a process should have ended long ago."""
        latest = self._clock() - self.options.hang_s
        return bool(seats.lanes) and all(
            lane.ending_since is not None and lane.ending_since < latest for lane in seats.lanes
        )

    def _look(self) -> None:
        with self._lock:
            stuck = [seats.worker for seats in self._seats if self._is_stuck(seats)]
        for worker in stuck:
            logger.warning("worker process %d hangs while its sessions are to end, and is killed", worker.pid)
            worker.is_leaving = True
            worker.kill()

    # -- ending ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> None:
        """End all workers; those that do not end in time are killed."""
        with self._lock:
            self._is_closing = True
            workers = [seats.worker for seats in self._seats]
            switchboard, self._switchboard = self._switchboard, None
        for worker in workers:
            worker.leave()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            if not worker.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("worker process %d did not end in time, and is killed", worker.pid)
                worker.kill()
        for worker in workers:
            worker.wait(timeout_s)
        if switchboard is not None:
            switchboard.stop()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1
