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
from typing import Any

from ...env.binding import Encoder
from ...errors import SessionLost, message_of
from ..base import WORKER_CRASHED, Lane, ProcessOptions
from .crew import Crew
from .damping import Damping, WorkersKeepDying
from .lane import ProcessLane
from .messages import WorkerSetup, modules_of, pack, pack_factory
from .worker import SocketThread, WorkerGone, WorkerProcess

logger = logging.getLogger(__name__)

_LOGGERS = ("", "openenv")


@dataclass(eq=False, slots=True)
class _Seats:
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
        self.crew = Crew("openenv-waiting")
        self._factory = factory
        self._parcel = pack_factory(factory)
        self._files, self._main = modules_of(factory, self.options.models)
        self._processes = self.options.processes or _cores()
        self._clock = clock
        self._damping = Damping(clock)
        self._lock = threading.Lock()
        self._seats: list[_Seats] = []
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

    def _place(self) -> _Seats:
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

    def _new_seats(self) -> _Seats:
        if self._switchboard is None:
            self._switchboard = SocketThread(self._look)
        worker = WorkerProcess(self._switchboard, on_gone=self._gone, on_answer=self._damping.answered)
        seats = _Seats(worker, set())
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

    def _seats_of(self, worker: WorkerProcess) -> _Seats | None:
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

    def _is_stuck(self, seats: _Seats) -> bool:
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
