"""Rollouts in worker processes of this machine: `ProcessEngine` has the interface of `Engine`, and several of them.

    this process                                     worker processes
    ProcessEngine.run(task) ── a thread each ──────> serve(): an `Engine` with sandboxes, capture proxy and store
         ▲                                               │ a thread per rollout
         └───────── events, outcome ─────────────────────┘ pickled, over one socket per worker

One process runs about a hundred rollouts per second at most, because its threads share one interpreter lock. Knows
processes and their ends. Knows nothing of phases; every worker writes to the store itself.
"""

# A worker:  starting ──> ready ──> lost    It died, for example killed by the kernel. Each of its rollouts gets a typed
#                |                          outcome in the store, and runs again on another worker, `retries` times.
#                |                          With a store it continues there: its agent gets the recorded answers.
#                v
#             unusable                      It cannot run the sandboxes or the agent, or died `_STARTS` times before it
#                                           was ready: no other one is started.
#
# Ends:      close       `__exit__`: rollouts are cancelled, sandboxes and proxies are closed, the process ends
#            EOF         this process has ended, in whatever way: the worker closes as well
#            SIGTERM     of a worker: the same
#            SIGKILL     of a worker: the kernel ends its local sandboxes, the next engine removes its folders

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from openenv.errors import RolloutCancelled, RolloutError
from openenv.rollout.agents.base import Agent
from openenv.rollout.progress import Cancellation, OnProgress, Progress
from openenv.rollout.run.engine import Engine, EngineOptions, WorkerLost, WorkerProxies, new_rollout_id
from openenv.rollout.run.shared_setup import SharedSetups, setup_key
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.store import RolloutStore, stored_outcome
from openenv.rollout.tasks.task import BranchPoint, Task

if TYPE_CHECKING:
    from openenv.rollout.capture.capture_server import ProxyOrder

logger = logging.getLogger(__name__)

RETRIES = 1
"""How often a rollout is repeated that lost its worker."""
_STARTS = 3
_CLOSE_S = 20.0
_NOTICE_S = 0.5
# With `-c`, `sys.path[0]` is the working folder. A file there may have the name of one of our modules.
_PROGRAM = "import sys; sys.path.pop(0); sys.path.insert(0, sys.argv[1]); "
_PROGRAM += "from openenv.rollout.run.process_engine import serve; serve(int(sys.argv[2]))"
_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


# -- messages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    path: list[str]
    """The `sys.path` for the modules of agents and sandboxes."""
    options: bytes
    """Pickled `EngineOptions`."""
    store: str | None
    shares_setup: bool


@dataclass(frozen=True, slots=True)
class _Run:
    number: int
    task: Task
    rollout_id: str
    metadata: Mapping[str, Any] | None
    start: BranchPoint | None
    wants_events: bool
    resumes: bool = False
    """Whether the rollout is in the store already and was interrupted."""


@dataclass(frozen=True, slots=True)
class _Cancel:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Control:
    """An order for the worker's capture proxy, or the order to end."""

    number: int
    order: ProxyOrder | Literal["close"]


@dataclass(frozen=True, slots=True)
class _Event:
    """An event of a rollout, or a message about the installation of the agent."""

    number: int
    event: Progress | str


@dataclass(frozen=True, slots=True)
class _Reply:
    """The result of a `_Start` (number 0), a `_Run` or a `_Control`: an outcome, None or an exception."""

    number: int
    value: Outcome | BaseException | None


# -- in a worker -------------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Serve rollouts until the other end closes, or a signal comes: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the other end, which cancels what must end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(EOFError, OSError), Connection(descriptor) as connection:
        start: _Start = connection.recv()
        sys.path[:] = start.path
        _WorkerProcess(connection, start).serve()


class _WorkerProcess:
    """The worker's side: an engine, and a thread per rollout."""

    def __init__(self, connection: Connection, start: _Start) -> None:
        self._connection, self._start = connection, start
        self._sending = threading.Lock()
        self._cancellations: dict[int, Cancellation] = {}
        self._threads: set[threading.Thread] = set()

    def serve(self) -> None:
        with ExitStack() as stack:
            try:
                engine, setups = self._enter(stack)
            except Exception as exc:  # the other process raises it
                self._send(_Reply(0, exc))
                return
            stack.callback(self._end_rollouts)
            self._send(_Reply(0, None))
            while True:
                message = self._connection.recv()
                if isinstance(message, _Run):
                    self._cancellations[message.number] = Cancellation()
                    self._begin(partial(self._run, engine, setups, message))
                elif isinstance(message, _Cancel):
                    cancellation = self._cancellations.get(message.number)
                    if cancellation is not None:
                        cancellation.cancel(message.reason)
                elif message.order == "close":
                    return
                else:
                    self._begin(partial(self._control, engine, message))

    def _enter(self, stack: ExitStack) -> tuple[Engine, SharedSetups | None]:
        start = self._start
        options: EngineOptions = pickle.loads(start.options)
        if start.store is not None:
            options = replace(options, store=stack.enter_context(RolloutStore(start.store)))
        options = replace(options, on_install=lambda message: self._send(_Event(0, message)))
        engine = stack.enter_context(Engine(options))
        return engine, stack.enter_context(SharedSetups(None)) if start.shares_setup else None

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="openenv-rollout", daemon=True)
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        thread.start()

    def _run(self, engine: Engine, setups: SharedSetups | None, order: _Run) -> None:
        def report(event: Progress) -> None:
            self._send(_Event(order.number, event))

        result: Outcome | BaseException
        try:
            with ExitStack() as stack:
                group = None
                if setups is not None:
                    key = setup_key(order.task)
                    group = setups.join(key)
                    stack.callback(setups.leave, key)
                common: dict[str, Any] = {
                    "on_progress": report if order.wants_events else None,
                    "cancel": self._cancellations[order.number],
                    "setup_group": group,
                }
                if order.resumes:
                    result = engine.resume(order.rollout_id, **common)
                else:
                    common |= {"metadata": order.metadata, "start": order.start}
                    result = engine.run(order.task, rollout_id=order.rollout_id, **common)
        except BaseException as exc:  # the other process raises it
            result = exc
        self._cancellations.pop(order.number, None)
        self._send(_Reply(order.number, result))

    def _control(self, engine: Engine, order: _Control) -> None:
        error: BaseException | None = None
        try:
            proxy = engine.capture
            if proxy is not None:
                assert order.order != "close"
                proxy.obey(order.order)
        except Exception as exc:  # the other process raises it
            error = exc
        self._send(_Reply(order.number, error))

    def _send(self, message: _Event | _Reply) -> None:
        with contextlib.suppress(OSError), self._sending:  # the other process has ended: `serve` notices that
            try:
                self._connection.send(message)
            except (TypeError, AttributeError, pickle.PicklingError) as exc:
                if not isinstance(message, _Reply):
                    raise
                value = message.value
                what = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(exc)
                self._connection.send(_Reply(message.number, RolloutError(what)))

    def _end_rollouts(self) -> None:
        for cancellation in list(self._cancellations.values()):
            cancellation.cancel("the engine was closed")
        deadline = time.monotonic() + _CLOSE_S / 2
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))


# -- in this process ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Pending:
    """A request without a reply."""

    on_progress: OnProgress | None = None
    setup_key: str | None = None
    result: Future[Outcome | None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Worker:
    """This process's view of a worker."""

    process: subprocess.Popen[bytes]
    connection: Connection
    starts_left: int
    is_ready: bool = False
    pending: dict[int, _Pending] = field(default_factory=dict)
    keys: Counter[str | None] = field(default_factory=Counter)
    """The setups of its rollouts."""
    load: int = 0
    """The number of its rollouts."""
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: object) -> None:
        """Send a message; a lost worker is noticed by its reader."""
        with contextlib.suppress(OSError), self.sending:
            self.connection.send(message)


class ProcessEngine(WorkerProxies):
    """Runs rollouts in worker processes, from any number of threads at once, as `Engine` does in this process.

    If a worker dies, each of its rollouts runs again on another one. With a store, it keeps its ID, and its agent gets
    the recorded answers; without one, the metadata of the outcome names the lost rollouts as `lost_rollouts`.

    Args:
        options: The options of each worker's engine. Agents and sandboxes that are objects must be picklable.
        processes: The number of workers.
        concurrency: The number of rollouts at once in all workers.
        retries: How often a rollout is repeated that lost its worker.
        share_setup: Run equal setups once if their rollouts run at the same time in one worker.

    Raises:
        ValueError: An option is out of range, or cannot be sent to another process.
        AgentUnavailable, SandboxUnavailable: On entering, if the workers cannot run the agent or the sandboxes.
        RolloutError: On entering, if the workers die before they are ready.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        processes: int,
        concurrency: int,
        retries: int = RETRIES,
        share_setup: bool = True,
    ) -> None:
        if processes < 1:
            raise ValueError("processes must be at least 1")
        if options.capture is not None:
            raise ValueError("capture cannot be given with processes: each worker has a capture proxy of its own")
        store = options.store
        if store is not None and not isinstance(store, RolloutStore):
            raise ValueError("with processes, store must be a RolloutStore: each worker opens it")
        self.options = options
        self._local = Engine(options)  # not entered: it only checks tasks
        self._store = store
        try:
            packed = pickle.dumps(replace(options, store=None, on_install=None))
        except Exception as exc:  # pickling calls methods of the caller's objects
            raise ValueError(f"The agent, the sandboxes or their options cannot be sent to processes: {exc}") from exc
        self._start_message = _Start(sys.path, packed, None if store is None else str(store.root), share_setup)
        self._processes, self._retries = processes, retries
        self._places = -(-concurrency // processes)
        self._numbers = itertools.count(1)
        self._events = threading.Lock()
        self._changed = threading.Condition()
        self._workers: list[_Worker] = []
        self._readers: list[threading.Thread] = []
        self._unusable: BaseException | None = None
        self._is_held = self._is_closed = False

    @property
    def agent(self) -> Agent:
        """The driver of the agent."""
        return self._local.agent

    def __enter__(self) -> ProcessEngine:
        try:
            for _ in range(self._processes):
                self._start_worker(_STARTS)
            with self._changed:
                while not any(worker.is_ready for worker in self._workers):
                    if not self._workers and self._unusable is not None:
                        raise self._unusable
                    self._changed.wait(_NOTICE_S)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def require_trust(self, task: Task) -> None:
        """Check the trust level of a task's checks; see `Engine.require_trust`."""
        self._local.require_trust(task)

    def require_sandboxes(self, task: Task) -> None:
        """Check that the backends can open the task's sandboxes; see `Engine.require_sandboxes`."""
        self._local.require_sandboxes(task)

    def run(
        self,
        task: Task,
        *,
        rollout_id: str | None = None,
        on_progress: OnProgress | None = None,
        cancel: Cancellation | None = None,
        metadata: Mapping[str, Any] | None = None,
        start: BranchPoint | None = None,
    ) -> Outcome:
        """Run one rollout in a worker; see `Engine.run`. An interrupted rollout of the store continues.

        Raises:
            ValueError, TrustError, SandboxUnsupported, StoreError: As in `Engine.run`.
            RolloutError: No worker is left.
        """
        cancel = cancel or Cancellation()
        lost: list[str] = []
        rollout_id = rollout_id or new_rollout_id()
        while True:
            began = time.time()
            try:
                if self._store is not None and self._store.is_begun(rollout_id):
                    stored = stored_outcome(self._store, rollout_id)
                    if stored is not None:  # its worker died afterwards
                        return stored
                order = _Run(0, task, rollout_id, metadata, start, wants_events=on_progress is not None)
                outcome = self._attempt(order, on_progress, cancel)
            except (RolloutCancelled, WorkerLost) as exc:
                is_cancelled = cancel.cancelled or isinstance(exc, RolloutCancelled)
                status: Status = "cancelled" if is_cancelled else "sandbox_failed"
                outcome = Outcome(
                    rollout_id=rollout_id,
                    task_id=task.task_id,
                    status=status,
                    phase="sandbox",
                    reason=cancel.reason if cancel.cancelled else str(exc),
                    agent=self.agent.name,
                    model="" if self.options.model is None else self.options.model.name,
                    started_at=began,
                    wall_s=time.time() - began,
                    metadata=dict(metadata or {}),
                    start=start,
                )
                if isinstance(exc, WorkerLost):
                    if status == "sandbox_failed" and len(lost) < self._retries:
                        lost.append(rollout_id)
                        rollout_id = new_rollout_id() if self._store is None else rollout_id
                        continue
                    if self._store is not None:
                        outcome = self._store.add_lost(outcome, task)
            if lost and self._store is None:
                outcome = outcome.model_copy(update={"metadata": {**outcome.metadata, "lost_rollouts": lost}})
            return outcome

    def _attempt(self, order: _Run, on_progress: OnProgress | None, cancel: Cancellation) -> Outcome:
        pending = _Pending(on_progress, setup_key(order.task))
        with self._worker_for(pending, cancel) as (worker, number):
            resumes = self._store is not None and self._store.is_begun(order.rollout_id)
            order = replace(order, number=number, resumes=resumes)
            try:
                worker.send(order)
            except Exception as exc:
                raise ValueError(f"The task or its metadata cannot be sent to a worker process: {exc}") from exc
            with cancel.on_cancel(lambda: worker.send(_Cancel(number, cancel.reason))):
                outcome = pending.result.result()
        assert outcome is not None
        return outcome

    def _order_all(self, order: ProxyOrder) -> None:
        with self._changed:
            self._is_held = order != "resume"
            workers = [worker for worker in self._workers if worker.is_ready]
        replies = [self._order(worker, order) for worker in workers]
        for reply in replies:
            with contextlib.suppress(WorkerLost):  # its calls have ended
                reply.result()

    def _order(self, worker: _Worker, order: ProxyOrder) -> Future[Outcome | None]:
        pending, number = _Pending(), next(self._numbers)
        with self._changed:
            if worker not in self._workers:
                pending.result.set_exception(WorkerLost("it ended before"))
                return pending.result
            worker.pending[number] = pending
        worker.send(_Control(number, order))
        return pending.result

    # -- workers ---------------------------------------------------------------------------------------------------

    def _start_worker(self, starts: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, _PACKAGES, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal reaches this process only
            )
        worker = _Worker(process, Connection(ours.detach()), starts - 1)
        reader = threading.Thread(target=self._read, args=[worker], name="openenv-worker", daemon=True)
        with self._changed:
            if self._is_closed:  # it has seen neither the agent nor a task
                process.kill()
                process.wait()
                worker.connection.close()
                return
            self._workers.append(worker)
            self._readers.append(reader)
        worker.send(self._start_message)
        reader.start()

    def _read(self, worker: _Worker) -> None:
        try:
            while True:
                self._take(worker, worker.connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:  # a message that cannot be read: the process may be in any state
            logger.exception("a worker process sent something unreadable")
            worker.process.kill()
        self._lose(worker)

    def _take(self, worker: _Worker, message: _Event | _Reply) -> None:
        if isinstance(message, _Reply) and message.number == 0:
            self._started(worker, message.value)
        elif isinstance(message, _Reply):
            with self._changed:
                pending = worker.pending.pop(message.number, None)
            if pending is None:  # the order to hold calls, of a worker that was started later
                return
            if isinstance(message.value, BaseException):
                pending.result.set_exception(message.value)
            else:
                pending.result.set_result(message.value)
        elif isinstance(message.event, str):
            self._call(self.options.on_install, message.event)
        else:
            waiting = worker.pending.get(message.number)
            self._call(None if waiting is None else waiting.on_progress, message.event)

    def _call(self, callback: Callable[[Any], None] | None, event: Progress | str) -> None:
        if callback is None:
            return
        with self._events:
            try:
                callback(event)
            except Exception:  # the caller's code must not end a worker's rollouts
                logger.exception("a progress callback failed")

    def _started(self, worker: _Worker, error: object) -> None:
        if isinstance(error, BaseException):
            with self._changed:
                self._unusable = error
                worker.starts_left = 0
            return  # it ends now
        if self._is_held:
            worker.send(_Control(next(self._numbers), "hold"))
        with self._changed:
            worker.is_ready = True
            self._changed.notify_all()

    def _lose(self, worker: _Worker) -> None:
        """Free a worker that has ended, and start another one."""
        with contextlib.suppress(OSError):
            worker.connection.close()
        try:
            code = worker.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        reason = f"the worker process {worker.process.pid} ended with {how}"
        with self._changed:
            if worker in self._workers:
                self._workers.remove(worker)
            pending, worker.pending = list(worker.pending.values()), {}
            if not worker.is_ready and worker.starts_left == 0 and self._unusable is None:
                self._unusable = RolloutError(f"Worker processes end before they are ready: {reason}")
            restarts = not self._is_closed and (worker.is_ready or worker.starts_left > 0)
            self._changed.notify_all()
        for each in pending:
            each.result.set_exception(WorkerLost(reason))
        if restarts:
            logger.warning("%s, another is started", reason)
            self._start_worker(_STARTS if worker.is_ready else worker.starts_left)

    @contextmanager
    def _worker_for(self, pending: _Pending, cancel: Cancellation) -> Iterator[tuple[_Worker, int]]:
        """Wait for a free place, and take it while the block runs; prefer a worker that runs the same setup.

        Raises:
            RolloutCancelled: While waiting.
        """
        number, key = next(self._numbers), pending.setup_key
        with cancel.on_cancel(self._wake), self._changed:
            while True:
                cancel.check()
                if self._is_closed:
                    raise RolloutCancelled("the engine is closed")
                free = [worker for worker in self._workers if worker.is_ready and worker.load < self._places]
                if free:
                    break
                if not self._workers and self._unusable is not None:
                    raise self._unusable
                self._changed.wait(_NOTICE_S)
            worker = min(free, key=lambda each: (key is None or not each.keys[key], each.load))
            worker.load += 1
            worker.keys[key] += 1
            worker.pending[number] = pending
        try:
            yield worker, number
        finally:
            with self._changed:
                worker.pending.pop(number, None)
                worker.load -= 1
                worker.keys[key] -= 1
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            workers = list(self._workers)
            self._changed.notify_all()
        for worker in workers:
            worker.send(_Control(0, "close"))
        deadline = time.monotonic() + _CLOSE_S
        for worker in workers:
            try:
                worker.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
        for reader in self._readers:
            reader.join(_CLOSE_S)
