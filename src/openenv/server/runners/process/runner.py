"""The process runner: environments in worker processes, so that a crash ends only the sessions of one worker.

    Session ── calls ──> ProcessLane ── requests ──> WorkerProcess ══ socket ══> child.SessionHost ──> Environment

Sessions are spread over several processes, the emptiest first; a dead process is replaced. Knows workers and lanes;
must not know sessions or environments.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from openenv.env.binding import Encoder
from openenv.env.copies import EnvironmentCopy
from openenv.env.tools.source import ToolEvents
from openenv.errors import NotForkable, SessionLost, message_of
from openenv.protocol.backoff import Backoff

from ..base import WORKER_CRASHED, Lane, LaneCall, NotSendable, ProcessOptions, cores
from ..dispatcher import Dispatcher, current_dispatcher
from . import fork_checks
from .messages import MessageKind, PackedState, WorkerSetup, modules_of, pack, pack_factory
from .stub import EnvironmentStub
from .worker import AwaitedReply, BlockingReply, ForkReply, SocketThread, WorkerGone, WorkerProcess, WorkerReply

logger = logging.getLogger(__name__)

PATIENCE: Final = 3
_PAUSES: Final = Backoff(first_pause_s=1.0, longest_pause_s=30.0, jitter=lambda: 1.0)
_LOGGERS: Final = ("", "openenv")


class WorkersKeepDying(RuntimeError):
    """New workers are refused for a while, because the last ones died before they answered anything."""


class WorkerDied(RuntimeError):
    """The worker process died while it built an environment."""


class StartBackoff:
    """Delays the start of workers after several consecutive ones died before they answered anything.

    From the death of number `PATIENCE` on, each one doubles the pause, from one second up to 30.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._deaths = 0
        self._until = 0.0
        self._last = ""

    def answered(self) -> None:
        """Record that a worker has answered a request."""
        if self._deaths:
            with self._lock:
                self._deaths = 0

    def died(self, how: str) -> None:
        """Record that a worker died without an answer."""
        with self._lock:
            self._deaths += 1
            self._last = how
            if self._deaths >= PATIENCE:
                self._until = self._clock() + _PAUSES.pause_s(self._deaths - PATIENCE)

    def check(self) -> None:
        """Return if a worker may be started now.

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


class PackedEncoder(NamedTuple):
    """A pickled encoder of results, and its number in workers."""

    number: int
    payload: bytes


class ProcessLane(Lane):
    """A session's place in a worker. Calls of the session that cannot be awaited run in a thread here, and wait.

    Each in a new one, and a daemon. Steps are awaited, so such calls are rare: constructors, and methods of the
    environment's own. One that waits for a hanging worker must neither delay others nor keep the server from ending.
    """

    def __init__(self, runner: ProcessRunner, worker: WorkerProcess, number: int) -> None:
        self.worker = worker
        self.number = number
        self.stub: EnvironmentStub
        self.ending_since: float | None = None
        self.is_abandoned = False
        self._runner = runner
        self._on_lost: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._is_built = False
        self._is_lost = False

    @property
    def host(self) -> ProcessLane:
        """Return the lane itself: each lane has its thread."""
        return self

    def submit(self, call: LaneCall, dispatcher: Dispatcher | None = None) -> None:
        """Run a call in a thread; a session submits one at a time."""
        _run_in_thread(call.run)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back with the reason when the worker has died, or now if it has."""
        with self._lock:
            self._on_lost = callback
            is_lost = self._is_lost and self._is_built
        if is_lost:
            callback(WORKER_CRASHED)

    def ending(self) -> None:
        """Record when the session began to close."""
        self.ending_since = time.monotonic()

    def abandon(self, call: object) -> None:
        """Give up the session; kill its process when it holds no further sessions."""
        self.is_abandoned = True
        self._runner.kill_abandoned(self.worker)

    def release(self) -> None:
        """Leave the worker."""
        self._runner.leave(self)

    # -- the environment ------------------------------------------------------------------------------------------

    def construct(self, factory: Callable[[], Any]) -> EnvironmentStub:
        """Build the environment in the worker, which has the factory, and return its stub; raises as `_construct`.

        Raises:
            WorkerDied: The process has died meanwhile.
            WorkersKeepDying: The process is not started, because others have died too soon.
            BaseException: The exception of the constructor.
        """
        return self._construct(None)

    def _construct(self, state: PackedState | None) -> EnvironmentStub:
        """Build the environment, or build it from the state of another one.

        Raises:
            WorkerDied: The process has died meanwhile.
            WorkersKeepDying: The process is not started, because others have died too soon.
            BaseException: The exception of the constructor.
        """
        reply = BlockingReply()
        try:
            self._runner.start(self.worker)
            self.worker.request(MessageKind.OPEN, pack((self.number, self._runner.single_thread, state)), reply)
            description = reply.wait()
        except (WorkerGone, SessionLost):
            raise self._died() from None
        with self._lock:
            self._is_built = not self._is_lost
        if not self._is_built:
            raise self._died()
        self.stub = EnvironmentStub(self, description)
        return self.stub

    async def fork(self, lanes: Sequence[Lane]) -> list[EnvironmentCopy]:
        """Fork the worker for each of these lanes, or copy the environment's state to their workers; return the copies.

        Raises:
            NotForkable: Neither is possible.
            SessionLost: The process has died.
        """
        others = [lane for lane in lanes if isinstance(lane, ProcessLane)]
        payload = pack((self.number, [lane.number for lane in others], fork_checks.is_possible()))
        reply = ForkReply(current_dispatcher())
        try:
            number = self.worker.fork(payload, reply)
            state = await reply.wait(partial(self.worker.cancel, number, self.number))
            if state is not None:
                return [self._copy_of_state(lane, state) for lane in others]
            return [self._copy_of_process(lane, *reply.copies.pop(0)) for lane in others]
        except WorkerGone:
            raise SessionLost(WORKER_CRASHED) from None
        except BaseException:
            reply.close()
            raise

    def _copy_of_state(self, lane: ProcessLane, state: PackedState) -> EnvironmentCopy:
        put_into = partial(EnvironmentStub.restore_pickled, state=state.pickled) if state.is_snapshot else None
        return EnvironmentCopy(partial(lane._construct, state), put_into)

    def _copy_of_process(self, lane: ProcessLane, pid: int, sock: socket.socket) -> EnvironmentCopy:
        self._runner.move_to_copy(lane, pid, sock, original=self.worker)
        lane.stub = self.stub.copied_to(lane)
        return EnvironmentCopy(lambda: lane.stub)

    def moved(self, worker: WorkerProcess) -> None:
        """Record that the session's environment moved to another worker."""
        with self._lock:
            self.worker = worker
            self._is_built = True

    def _died(self) -> BaseException:
        return self.worker.failure or WorkerDied(
            f"its worker process died while the environment was built ({self.worker.how})"
        )

    def lose(self) -> None:
        """Record that the process has died; a constructor that runs in it raises by itself."""
        with self._lock:
            self._is_lost = True
            is_built = self._is_built
        if is_built and self._on_lost is not None:
            self._on_lost(WORKER_CRASHED)

    async def ask(
        self, name: str, argument: Any, *, encode: Encoder | None = None, events: ToolEvents | None = None
    ) -> Any:
        """Run an operation on the environment and wait, on the event loop.

        Raises:
            SessionLost: The process has died.
        """
        reply = AwaitedReply(current_dispatcher(), events)
        encoder = None if encode is None else self._runner.encoder(encode)
        number = self._request(name, argument, reply, encoder)
        result = await reply.wait(partial(self.worker.cancel, number, self.number))
        return result if encode is None or encoder is not None else encode(result)

    def ask_blocking(self, name: str, argument: Any) -> Any:
        """Run an operation on the environment and wait, in this thread; raises as `ask` does."""
        reply = BlockingReply()
        self._request(name, argument, reply, None)
        return reply.wait()

    def _request(self, name: str, argument: Any, reply: WorkerReply, encoder: PackedEncoder | None) -> int:
        if encoder is not None:
            self.worker.send_encoder(*encoder)
        request = (self.number, name, 0 if encoder is None else encoder.number, argument, reply.events is not None)
        try:
            payload = pack(request)
        except Exception as exc:
            raise NotSendable(f"the argument of {name} cannot be sent to a worker process: {message_of(exc)}") from exc
        try:
            return self.worker.request(MessageKind.ASK, payload, reply)
        except WorkerGone:
            raise SessionLost(WORKER_CRASHED) from None

    async def close(self) -> None:
        """Close the environment, unless the worker is dead."""
        reply = AwaitedReply(current_dispatcher())
        try:
            number = self.worker.request(MessageKind.CLOSE, pack(self.number), reply)
            await reply.wait(partial(self.worker.cancel, number, self.number))
        except (WorkerGone, SessionLost):
            return


class ProcessRunner:
    """Places sessions in worker processes.

    Args:
        factory: Makes an environment; sent to the workers.
        options: How many processes, and how many sessions in each.
        single_thread: Put all sessions of a process on one and the same thread there.
        clock: A steady clock.

    Raises:
        NotSendable: The factory cannot be sent.
        RuntimeError: The platform has no Unix sockets.
    """

    name = "process"
    placement = "process"

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
        self._factory = pack_factory(factory)
        self._files, self._main = modules_of(factory, self.options.models)
        self._processes = self.options.processes or cores()
        self._clock = clock
        self._backoff = StartBackoff(clock)
        self._lock = threading.Lock()
        self._lanes: dict[WorkerProcess, set[ProcessLane]] = {}  # of each worker
        self._ancestors: set[WorkerProcess] = set()  # workers without lanes; they wait for the end of their copies
        self._lane_numbers = itertools.count(1)
        self._encoder_numbers = itertools.count(1)
        self._encoders: dict[Encoder, PackedEncoder | None] = {}
        self._sockets: SocketThread | None = None
        self._is_closing = False

    @property
    def workers(self) -> list[WorkerProcess]:
        """The current workers."""
        with self._lock:
            return list(self._lanes)

    # -- placing --------------------------------------------------------------------------------------------------

    def lane(self) -> Lane:
        """Reserve a place."""
        with self._lock:
            worker = self._place()
            lane = ProcessLane(self, worker, next(self._lane_numbers))
            self._lanes[worker].add(lane)
        return lane

    def pin(self, lane: Lane) -> None:
        """Put all later sessions of a process on one thread there."""
        self.single_thread = True

    def _place(self) -> WorkerProcess:
        most = self.options.sessions_each
        available = [
            worker
            for worker, lanes in self._lanes.items()
            if not (worker.is_gone or worker.is_leaving or worker.original is not None or self._is_stuck(lanes))
            and (most is None or len(lanes) < most)
            and not any(lane.is_abandoned for lane in lanes)  # so that it can be killed one day
        ]
        emptiest = min(available, key=lambda worker: len(self._lanes[worker]), default=None)
        if emptiest is None or (self._lanes[emptiest] and self._started_count < self._processes):
            return self._new_worker()
        return emptiest

    @property
    def _started_count(self) -> int:
        """The number of workers without copies, which end with their only session."""
        return sum(worker.original is None for worker in self._lanes)

    def _new_worker(self) -> WorkerProcess:
        if self._sockets is None:
            self._sockets = SocketThread(self._kill_stuck)
        worker = WorkerProcess(self._sockets, on_gone=self._gone, on_answer=self._backoff.answered)
        self._lanes[worker] = set()
        return worker

    def move_to_copy(self, lane: ProcessLane, pid: int, sock: socket.socket, *, original: WorkerProcess) -> None:
        """Move a lane from its place to a copy of another lane's worker.

        Raises:
            NotForkable: The copy has died, or the runner is closed.
        """
        self.leave(lane)
        with self._lock:
            if self._sockets is None:
                sock.close()
                raise NotForkable("The server is shutting down.")
            copied = WorkerProcess(
                self._sockets, on_gone=self._gone, on_answer=self._backoff.answered, original=original
            )
            try:
                copied.adopt(pid, sock)
            except OSError as exc:
                sock.close()
                raise NotForkable(f"A copy of the process died at once: {message_of(exc)}") from exc
            copied.ancestor.copies.add(copied)
            self._lanes[copied] = {lane}
            lane.moved(copied)

    def start(self, worker: WorkerProcess) -> None:
        """Start a worker, unless it runs.

        Raises:
            WorkersKeepDying: Not now: others have died too soon.
            WorkerGone: The runner has given the worker up before it was started.
        """
        with worker.starting:
            if worker.is_started:
                return
            if worker.is_gone:
                raise WorkerGone
            try:
                self._backoff.check()
                worker.start(self._setup())
            except BaseException as exc:
                worker.how = message_of(exc)
                worker.take_pending()
                self._forget(worker)
                raise

    def _setup(self) -> WorkerSetup:
        levels = {name: logging.getLogger(name or None).getEffectiveLevel() for name in _LOGGERS}
        return WorkerSetup(list(sys.path), self._files, self._main, self._factory, os.getpid(), levels)

    def encoder(self, encode: Encoder) -> PackedEncoder | None:
        """Return an encoder for workers; None if it cannot be pickled."""
        if encode in self._encoders:
            return self._encoders[encode]
        try:
            packed = PackedEncoder(next(self._encoder_numbers), pack(encode))
        except Exception:
            packed = None
        return self._encoders.setdefault(encode, packed)

    def leave(self, lane: ProcessLane) -> None:
        """Remove a lane; a surplus worker ends with its last lane."""
        with self._lock:
            worker, lanes = lane.worker, self._lanes.get(lane.worker)
            if lanes is None:
                return
            lanes.discard(lane)
            is_copy = worker.original is not None
            is_spare = not lanes and (is_copy or self._started_count > self._processes or not worker.is_started)
            if is_spare:
                del self._lanes[worker]
                if worker.copies:  # it has to ask for their status when they end
                    self._ancestors.add(worker)
                    return
        if is_spare:
            worker.leave()
        else:
            self.kill_abandoned(worker)

    def kill_abandoned(self, worker: WorkerProcess) -> None:
        """Kill a worker if all of its sessions are abandoned."""
        with self._lock:
            lanes = self._lanes.get(worker)
            is_abandoned = bool(lanes) and all(lane.is_abandoned for lane in lanes or ())
        if is_abandoned and not worker.is_leaving:
            logger.warning("worker process %d holds only sessions that do not end, and is killed", worker.pid)
            worker.is_leaving = True
            worker.kill()

    def _forget(self, worker: WorkerProcess) -> set[ProcessLane]:
        with self._lock:
            return self._lanes.pop(worker, set())

    # -- watching, in the socket thread ---------------------------------------------------------------------------

    def _gone(self, worker: WorkerProcess) -> None:
        pending = worker.take_pending()
        lanes = self._forget(worker)
        is_copy = worker.original is not None
        if is_copy:
            self._reap(worker)
        is_crash = not (worker.is_leaving or self._is_closing)
        if is_crash:
            what = f"could not start: {worker.failure}" if worker.failure is not None else f"died ({worker.how})"
            logger.error("worker process %d %s; %d session(s) are lost with it", worker.pid, what, len(lanes))
            if not worker.has_answered and not is_copy:
                self._backoff.died(str(worker.failure or worker.how))
        for reply in pending:
            reply.resolve(None, SessionLost(WORKER_CRASHED))
        for lane in lanes:
            lane.lose()
        if is_crash and worker.has_answered and not is_copy:
            self._replace()

    def _reap(self, copied: WorkerProcess) -> None:
        """Let the parent of an ended copy, or its ancestor, collect the exit status."""
        assert copied.original is not None
        ancestor = copied.ancestor
        for worker in {copied.original, ancestor}:
            if not worker.is_gone:
                worker.reap(copied.pid)
        with self._lock:
            ancestor.copies.discard(copied)
            is_last = not ancestor.copies and ancestor in self._ancestors
            self._ancestors.discard(ancestor) if is_last else None
        if is_last:
            ancestor.leave()

    def _replace(self) -> None:
        """Start another process before a session has to wait for it."""
        with self._lock:
            if self._is_closing or self._started_count >= self._processes:
                return
            worker = self._new_worker()
        _run_in_thread(partial(self._start_spare, worker))

    def _start_spare(self, worker: WorkerProcess) -> None:
        try:
            self.start(worker)
        except (WorkersKeepDying, WorkerGone):
            return
        except OSError:
            logger.exception("a worker process could not be replaced")

    def _is_stuck(self, lanes: set[ProcessLane]) -> bool:
        """Return whether all sessions of a process should have ended long ago."""
        latest = self._clock() - self.options.hang_s
        return bool(lanes) and all(lane.ending_since is not None and lane.ending_since < latest for lane in lanes)

    def _kill_stuck(self) -> None:
        with self._lock:
            stuck = [worker for worker, lanes in self._lanes.items() if self._is_stuck(lanes)]
        for worker in stuck:
            logger.warning("worker process %d hangs while its sessions are to end, and is killed", worker.pid)
            worker.is_leaving = True
            worker.kill()

    # -- ending ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> None:
        """End all workers; kill those still running when the time is up."""
        with self._lock:
            self._is_closing = True
            workers = [*self._lanes, *self._ancestors]
            sockets, self._sockets = self._sockets, None
        for worker in workers:
            worker.leave()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            if not worker.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("worker process %d did not end in time, and is killed", worker.pid)
                worker.kill()
        for worker in workers:
            worker.wait(timeout_s)
        if sockets is not None:
            sockets.stop()


def _run_in_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="openenv-waiting", daemon=True).start()
