"""Rollouts on a Ray cluster: `RayEngine` runs each one in a worker process, with sandboxes on the worker's node.

    this process, the driver                        the cluster
    RayEngine.run(task) ── a thread per rollout ──> RolloutWorker: an `Engine` with sandboxes and a capture proxy
         ▲   store, retries, progress                    │ threads: at most `places` rollouts at once
         └───────── events, files, outcome ──────────────┘ one stream per rollout

Only the driver writes to the store. Ray is imported when an engine is entered.
"""

# A worker:  starting ──> ready ──> lost    Its process or node died, or Ray cannot reach it. Its rollouts are repeated
#                |                          on other workers, and a new worker starts if the cluster has room.
#                v
#             unusable                      Its node cannot run the sandboxes or the agent. It is not replaced, and its
#                                           error is raised if no worker is left.
#
# An attempt is repeated only if it ended as `sandbox_failed` or lost its worker, on another node if possible. A failure
# of the agent counts: repeating it until it passes would falsify the reward. The driver gets each journal while it
# grows, and gives it to the next worker: the agent gets its recorded answers again.

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from openenv._lazy import load_package_version
from openenv.errors import CaptureError, RolloutCancelled, RolloutError
from openenv.protocol.addresses import is_loopback
from openenv.providers.ray_cluster import RayCluster
from openenv.rollout.capture.records import FILE, Recorder
from openenv.rollout.progress import Cancellation, OnProgress, Progress, Reporter
from openenv.rollout.run.engine import (
    Engine,
    EngineOptions,
    WorkerLost,
    WorkerProxies,
    check_rollout_id,
    named_backend,
    new_rollout_id,
)
from openenv.rollout.run.shared_setup import SharedSetups, setup_key
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.tasks.task import BranchPoint, Task, sandbox_spec
from openenv.sandboxes.base import Sandboxes
from openenv.sandboxes.host import scratch

if TYPE_CHECKING:
    from openenv.rollout.capture.capture_server import ProxyOrder
    from openenv.rollout.store.store import RolloutStore

logger = logging.getLogger(__name__)

RETRIES = 2
_CHUNK = 4 * 1024 * 1024
_UNSENT = 16
"""The most parts of a stream that wait in a worker, so that files are not read faster than they are sent."""
_CONTROL_CALLS = 4
_STARTS = 3
"""The most starts of a worker if its process dies before it is ready."""
_CANCEL_S = 60.0
"""The time limit for ending a cancelled rollout; after it, the worker is killed."""
_CLOSE_S = 15.0
_JOURNAL_S = 0.5
"""The pause between two parts of a journal: if a worker is lost, so are at most the answers of this time."""
_JOURNAL = f"captures/{FILE}"
_NOTICE_S = 1.0


# -- in the cluster ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RayWorkerPlace:
    """The node, process and package version of a worker."""

    node_id: str
    address: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class FilePart:
    """The next bytes of one of a rollout's files."""

    path: str
    """The path in the rollout's folder: `worktree.tar`, `captures/...`."""
    data: bytes


class Outbox:
    """Replaces the store in a worker: it sends files to the driver, which stores them.

    Args:
        folder: The folder of model calls and logs until they are sent.
        has_store: Whether the driver has a store; if not, no files are sent.
    """

    def __init__(self, folder: Path, *, has_store: bool) -> None:
        self.captures = folder / "captures"
        self._live = folder / "live"
        self._has_store = has_store
        self._emits: dict[str, Callable[[FilePart], None]] = {}
        self._journals: dict[str, SentJournal] = {}

    @contextmanager
    def sending(self, rollout_id: str, emit: Callable[[FilePart], None], journal: bytes) -> Iterator[None]:
        """Send the files of a rollout with `emit` while the block runs; `journal` is that of a lost attempt."""
        self._emits[rollout_id] = emit
        (self._live / rollout_id).mkdir(parents=True)
        file = self.captures / rollout_id / FILE
        if journal:
            file.parent.mkdir(parents=True)
            file.write_bytes(journal)
        try:
            with SentJournal(file, emit) as self._journals[rollout_id]:
                yield
        finally:
            del self._emits[rollout_id], self._journals[rollout_id]
            # This worker may get the same rollout again, if its sandbox failed.
            for folder in (self.captures, self._live):
                shutil.rmtree(folder / rollout_id, ignore_errors=True)

    def begin(self, rollout_id: str, task: Task, *, about: Mapping[str, Any] | None = None) -> None:
        """Do nothing: the driver has already marked the rollout as running."""

    def live_file(self, rollout_id: str, name: str) -> Path:
        """Return the path of a file that is written during the rollout."""
        return self._live / rollout_id / name

    def add(
        self,
        outcome: Outcome,
        task: Task,
        *,
        worktree: Path | None = None,
        baseline: Path | None = None,
        agent_log: Path | None = None,
    ) -> None:
        """Send a rollout's existing files. Without a store, add its sequences to the outcome instead."""
        records = self.captures / outcome.rollout_id
        if not self._has_store and records.is_dir():
            from openenv.rollout.capture import export, read  # agents without a model need no export

            with suppress(CaptureError):
                outcome.keep_sequences(export.sequences(read(records)))
        self._journals[outcome.rollout_id].send()
        paths = [path for path in sorted(records.rglob("*")) if path != records / FILE]
        files = [(f"captures/{path.relative_to(records).as_posix()}", path) for path in paths]
        for name, path in (*files, ("worktree.tar", worktree), ("baseline.tar", baseline), ("agent.log", agent_log)):
            if path is not None and path.is_file():
                self._send(outcome.rollout_id, path, name)

    def _send(self, rollout_id: str, path: Path, name: str) -> None:
        if not self._has_store:
            return
        emit = self._emits[rollout_id]
        with path.open("rb") as file:
            emit(FilePart(name, file.read(_CHUNK)))  # an empty file also has one part
            while data := file.read(_CHUNK):
                emit(FilePart(name, data))


class SentJournal:
    """Sends a journal while it grows; a context manager.

    Args:
        path: The journal, which may not exist yet.
        emit: Sends a part.
    """

    def __init__(self, path: Path, emit: Callable[[FilePart], None]) -> None:
        self._path, self._emit = path, emit
        self._sent = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="openenv-journal", daemon=True)

    def __enter__(self) -> SentJournal:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(_JOURNAL_S):
            self.send()

    def send(self) -> None:
        """Send the bytes that were added since the last time."""
        with self._lock, suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._sent)
            while data := file.read(_CHUNK):
                self._emit(FilePart(_JOURNAL, data))
                self._sent += len(data)


class RolloutWorker:
    """A process of the cluster that runs rollouts: a Ray actor, whose methods are called in threads.

    Args:
        options: The options of its engine.
        has_store: Whether the driver has a store.
        shares_setup: Whether equal setups run once if their rollouts run here at the same time.
    """

    def __init__(self, options: EngineOptions, *, has_store: bool, shares_setup: bool) -> None:
        self._options, self._has_store, self._shares_setup = options, has_store, shares_setup
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self._outbox: Outbox | None = None
        self._setups: SharedSetups | None = None
        self._cancellations: dict[str, Cancellation] = {}
        self._running: set[str] = set()

    def start(self) -> Iterator[RayWorkerPlace | str]:
        """Yield the worker's place, then check the sandboxes and install the agent and yield messages about it.

        Raises:
            SandboxUnavailable, AgentUnavailable: this node cannot run the rollouts.
        """
        yield from _stream(self._start)

    def _start(self, emit: Callable[[RayWorkerPlace | str], None]) -> None:
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        emit(RayWorkerPlace(node_id, ray.util.get_node_ip_address(), os.getpid(), load_package_version()))
        with ExitStack() as stack:
            self._outbox = Outbox(stack.enter_context(scratch()), has_store=self._has_store)
            options = replace(self._options, on_install=emit, store=self._outbox)
            self._engine = stack.enter_context(Engine(options))
            self._setups = stack.enter_context(SharedSetups(None)) if self._shares_setup else None
            self._stack = stack.pop_all()

    def run(
        self, task: Task, rollout_id: str, metadata: Mapping[str, Any] | None, journal: bytes
    ) -> Iterator[Progress | FilePart | Outcome]:
        """Run a rollout; yield its events and files, and at the end its outcome.

        Args:
            task: Its task.
            rollout_id: Its ID.
            metadata: Its labels.
            journal: The journal of a lost attempt, whose answers the agent gets again; empty for the first one.
        """
        yield from _stream(partial(self._run, task, rollout_id, metadata, journal))

    def _run(
        self,
        task: Task,
        rollout_id: str,
        metadata: Mapping[str, Any] | None,
        journal: bytes,
        emit: Callable[[Progress | FilePart | Outcome], None],
    ) -> None:
        assert self._engine is not None
        assert self._outbox is not None

        def report(event: Progress) -> None:
            # The driver reports these phases itself, after it has stored the rollout.
            if event.phase != "done" and (self._has_store or event.phase != "store"):
                emit(event)

        cancel = self._cancellations.setdefault(rollout_id, Cancellation())
        with ExitStack() as stack:
            self._running.add(rollout_id)
            stack.callback(self._running.discard, rollout_id)
            stack.callback(self._cancellations.pop, rollout_id, None)
            group = None
            if self._setups is not None:
                key = setup_key(task)
                group = self._setups.join(key)
                stack.callback(self._setups.leave, key)
            stack.enter_context(self._outbox.sending(rollout_id, emit, journal))
            outcome = self._engine.run(
                task,
                rollout_id=rollout_id,
                start=BranchPoint(rollout_id, is_branch=False) if journal else None,
                on_progress=report,
                cancel=cancel,
                metadata=metadata,
                setup_group=group,
            )
        emit(outcome.model_copy(update={"start": None}))  # its start is an attempt of itself

    def cancel(self, rollout_id: str, reason: str) -> None:
        """End a rollout, which still yields its outcome. Ray calls have no order: this may arrive before `run`."""
        self._cancellations.setdefault(rollout_id, Cancellation()).cancel(reason)

    def control(self, order: ProxyOrder) -> None:
        """Hold, pause or resume the model calls of this worker's capture proxy."""
        assert self._engine is not None
        proxy = self._engine.capture
        if proxy is not None:
            proxy.obey(order)

    def close(self) -> None:
        """End all rollouts and free the engine's resources."""
        for cancel in list(self._cancellations.values()):
            cancel.cancel("the engine is closed")
        deadline = time.monotonic() + _CLOSE_S
        while self._running and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stack.close()


def _stream(work: Callable[[Callable[[Any], None]], None]) -> Iterator[Any]:
    """Run blocking work in a thread and yield the parts that it emits; raise its exception at the end."""
    parts: queue.Queue[Any] = queue.Queue(_UNSENT)
    end = object()
    error: BaseException | None = None

    def run() -> None:
        nonlocal error
        try:
            work(parts.put)
        except BaseException as exc:  # raised again in the yielding thread
            error = exc
        parts.put(end)

    threading.Thread(target=run, name="openenv-rollout", daemon=True).start()
    while (part := parts.get()) is not end:
        yield part
    if error is not None:
        raise error


# -- in the driver -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Worker:
    """The driver's view of a worker."""

    actor: Any
    starts_left: int
    place: RayWorkerPlace | None = None
    is_ready: bool = False
    load: int = 0
    """The number of rollouts that it runs."""

    @property
    def node(self) -> str:
        """The address of its node, for messages."""
        return "a node" if self.place is None else f"node {self.place.address}"


class RayEngine(WorkerProxies):
    """Runs rollouts on a Ray cluster, from any number of threads at once, as `Engine` does on this machine.

    Rollouts are spread over workers, and workers over nodes. A rollout that ends as `sandbox_failed` or loses its node
    continues on another node, with the same ID and its recorded answers. `metadata["ray"]` of an outcome names the node
    and earlier failures.

    Args:
        options: The options of each worker's engine. Ray must be able to pickle agents and sandboxes that are objects.
            `capture` is refused: each worker has its own proxy.
        cluster: The cluster, and the resources that a worker reserves; by default the cluster of this machine.
        concurrency: The number of rollouts at once in the whole cluster; by default one for each worker that fits into
            its free resources. A larger number runs several rollouts per worker.
        retries: How often a rollout is repeated if its sandbox or node failed.
        share_setup: Run equal setups once if their rollouts run at the same time in one worker.

    Raises:
        ValueError: an argument is out of range or not supported on Ray.
        RolloutError: on entering, if Ray is not installed or the cluster does not exist.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        cluster: RayCluster | None = None,
        concurrency: int | None = None,
        retries: int = RETRIES,
        share_setup: bool = True,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        if retries < 0:
            raise ValueError("retries must be 0 or more")
        if options.capture is not None:
            raise ValueError("capture cannot be given with Ray: each worker has a capture proxy of its own")
        self._local = Engine(options)  # not entered: it only checks and describes tasks
        self.agent, self.model = self._local.agent, options.model
        self._backends = (named_backend(options.sandbox), named_backend(options.verify_sandbox or options.sandbox))
        self.store = cast("RolloutStore | None", options.store)
        self._on_install = options.on_install or (lambda message: logger.info("%s", message))
        self._options = replace(options, store=None, on_install=None)  # Ray pickles them for its workers
        self._cluster, self._retries, self._share_setup = cluster or RayCluster(), retries, share_setup
        self.concurrency = concurrency or 0
        """The number of rollouts at once. If it was not given, entering the engine sets it."""
        self._places = 1
        self._ray: Any = None
        self._folder = Path()
        self._events = threading.Lock()
        self._changed = threading.Condition()
        self._workers: list[_Worker] = []
        self._unusable: BaseException | None = None
        self._last_ready_at = 0.0
        self._is_held = self._is_closed = False
        self._stack = ExitStack()

    def __enter__(self) -> RayEngine:
        self._ray = self._cluster.connect(RolloutError)
        with ExitStack() as stack:
            self._folder = stack.enter_context(scratch())
            room = max(1, self._cluster.fits(self._ray.available_resources()))
            self.concurrency = self.concurrency or room
            count = min(room, self.concurrency)
            self._places = math.ceil(self.concurrency / count)
            self._last_ready_at = time.monotonic()
            stack.callback(self._close_workers)
            for _ in range(count):
                self._start_worker(_STARTS)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def require_trust(self, task: Task) -> None:
        """Check the trust level of a task's checks; see `Engine.require_trust`."""
        self._local.require_trust(task)

    def require_sandboxes(self, task: Task) -> None:
        """Check that the backends support the task's sandboxes. Each node checks its own resources later.

        Raises:
            SandboxUnsupported: a backend has no images, or no network for the setup.
        """
        needed = replace(sandbox_spec(task), network=task.network == "setup")
        for backend in self._backends:
            Sandboxes.require(backend, needed)

    def run(
        self,
        task: Task,
        *,
        rollout_id: str | None = None,
        on_progress: OnProgress | None = None,
        cancel: Cancellation | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Run one rollout on a worker. A failure of the rollout is a status of the outcome, not an exception.

        Raises:
            ValueError: the ID cannot be the name of a folder.
            TrustError: a check of the task has a lower trust level than required; nothing was run.
            StoreError: the outcome could not be stored; the exception carries it.
            RolloutError: no worker could be started in time.
            SandboxUnavailable, AgentUnavailable: no node can run the rollouts.
        """
        self.require_trust(task)
        rollout_id = rollout_id or new_rollout_id()
        check_rollout_id(rollout_id)
        folder = self._folder / rollout_id
        try:
            folder.mkdir()
        except FileExistsError:
            raise RolloutError(f"A rollout '{rollout_id}' is running already") from None
        try:
            reporter = Reporter(rollout_id, on_progress, lock=self._events)
            if self.store is not None:
                self.store.begin(rollout_id, task, about=self._local.about(task, metadata))
                reporter.journal = Recorder(self.store.captures / rollout_id / FILE).event
            run = _RemoteRollout(task, rollout_id, metadata, reporter, cancel or Cancellation(), folder)
            outcome = self._run(run)
            if self.store is not None:
                self.store.keep_capture(rollout_id, folder / "captures")
                tars = {"worktree": folder / "worktree.tar", "baseline": folder / "baseline.tar"}
                self.store.add(outcome, task, agent_log=folder / "agent.log", **tars)
            reporter.phase = "done"
            reporter.say(f"{outcome.status}, reward {outcome.reward}")
            return outcome
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # -- attempts --------------------------------------------------------------------------------------------------

    def _run(self, run: _RemoteRollout) -> Outcome:
        """Repeat a rollout until its outcome says something about the agent, or no attempt is left."""
        failures: list[str] = []
        failed_nodes: set[str] = set()
        journal = b""
        for number in itertools.count(1):
            worker: _Worker | None = None
            try:
                worker = self._acquire(run.cancel, failed_nodes)
                outcome = self._follow(worker, run, journal)
            except RolloutCancelled as exc:
                outcome = self._unfinished(run, "cancelled", str(exc))
            except WorkerLost as exc:
                assert worker is not None
                self._replace(worker, str(exc))
                is_cancelled = run.cancel.cancelled
                reason = run.cancel.reason if is_cancelled else f"the worker on {worker.node} was lost: {exc}"
                outcome = self._unfinished(run, "cancelled" if is_cancelled else "sandbox_failed", reason)
            finally:
                if worker is not None:
                    self._release(worker)
            if outcome.status != "sandbox_failed" or run.cancel.cancelled or number > self._retries:
                break
            assert worker is not None
            assert worker.place is not None
            failures.append(f"{worker.place.address}: {outcome.reason}")
            failed_nodes.add(worker.place.node_id)
            journal = max(journal, run.journal(), key=len)
            run.forget_files()
            run.reporter.phase = "sandbox"
            run.reporter.say(f"attempt {number} of {1 + self._retries} failed: {outcome.reason}; running it again")
        where: dict[str, Any] = {}
        if worker is not None and worker.place is not None:
            where = {"node": worker.place.address, "node_id": worker.place.node_id}
        if failures:
            where["failed_attempts"] = failures
        return outcome.model_copy(update={"metadata": {**outcome.metadata, "ray": where}})

    def _follow(self, worker: _Worker, run: _RemoteRollout, journal: bytes) -> Outcome:
        """Run a rollout on a worker, from the journal of a lost attempt; receive its events, files and outcome.

        Raises:
            WorkerLost: the worker has died or cannot be reached.
        """
        from ray.exceptions import RayError, RayTaskError

        outcome: Outcome | None = None
        with self._cancelling(worker, run):
            try:
                stream = worker.actor.run.options(num_returns="streaming")
                for reference in stream.remote(run.task, run.rollout_id, run.metadata, journal):
                    part = self._ray.get(reference)
                    if isinstance(part, Outcome):
                        outcome = part
                    else:
                        run.take(part)
            except RayTaskError as exc:  # raised by our code in the worker, not by Ray
                raise exc.cause from exc
            except RayError as exc:
                raise WorkerLost(_words(exc)) from exc
        if outcome is None:
            raise WorkerLost("its stream ended before the rollout did")
        return outcome

    @contextmanager
    def _cancelling(self, worker: _Worker, run: _RemoteRollout) -> Iterator[None]:
        """Forward a cancellation to the worker while the block runs; kill a worker that does not react in time."""
        timer = threading.Timer(_CANCEL_S, self._kill, [worker])
        timer.daemon = True

        def cancel() -> None:
            worker.actor.cancel.remote(run.rollout_id, run.cancel.reason)
            timer.start()

        with run.cancel.on_cancel(cancel):
            try:
                yield
            finally:
                timer.cancel()

    def _unfinished(self, run: _RemoteRollout, status: Status, reason: str) -> Outcome:
        """Return the outcome of an attempt that no worker finished."""
        return Outcome(
            rollout_id=run.rollout_id,
            task_id=run.task.task_id,
            status=status,
            phase=run.reporter.phase,
            reason=reason,
            agent=self.agent.name,
            model="" if self.model is None else self.model.name,
            sandbox=self._backends[0].name,
            started_at=run.started_at,
            wall_s=run.reporter.elapsed_s,
            metadata=dict(run.metadata or {}),
        )

    def _order_all(self, order: ProxyOrder) -> None:
        with self._changed:
            self._is_held = order != "resume"
            workers = [worker for worker in self._workers if worker.is_ready]
        for reply in [worker.actor.control.remote(order) for worker in workers]:
            self._await_order(reply)

    def _await_order(self, reply: Any) -> None:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            self._ray.get(reply)
        except RayTaskError as exc:
            raise exc.cause from exc
        except RayActorError:  # a lost worker: its calls have ended
            pass

    # -- workers ---------------------------------------------------------------------------------------------------

    def _start_worker(self, starts: int) -> None:
        ray = self._ray
        # Extra threads let the driver cancel and close a worker while all of its places are busy.
        options = {**self._cluster.actor_options(), "max_concurrency": self._places + _CONTROL_CALLS}
        remote = ray.remote(RolloutWorker).options(scheduling_strategy="SPREAD", **options)
        try:
            actor = remote.remote(self._options, has_store=self.store is not None, shares_setup=self._share_setup)
        except TypeError as exc:
            raise ValueError(f"Ray cannot send the agent, the sandboxes or their options to its nodes: {exc}") from exc
        worker = _Worker(actor, starts - 1)
        with self._changed:
            self._workers.append(worker)
        threading.Thread(target=self._await_start, args=[worker], name="openenv-ray-worker", daemon=True).start()

    def _await_start(self, worker: _Worker) -> None:
        from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

        try:
            for reference in worker.actor.start.options(num_returns="streaming").remote():
                part = self._ray.get(reference)
                if isinstance(part, RayWorkerPlace):
                    worker.place = part
                    self._check_place(part)
                else:
                    self._report_install(f"{worker.node}: {part}")
        except RayTaskError as exc:
            self._give_up(worker, exc.cause)
        except RuntimeEnvSetupError as exc:
            self._give_up(worker, RolloutError(f"Ray cannot create the runtime_env of a worker: {_words(exc)}"))
        except RolloutError as exc:
            self._give_up(worker, exc)
        except RayError as exc:
            if worker.starts_left > 0:
                self._replace(worker, _words(exc))
            else:
                self._give_up(worker, RolloutError(f"A worker on {worker.node} does not start: {_words(exc)}"))
        else:
            self._make_ready(worker)

    def _make_ready(self, worker: _Worker) -> None:
        """Let a worker run rollouts; if model calls are held, its proxy holds them first."""
        is_held = False
        while True:
            with self._changed:
                if is_held == self._is_held:
                    worker.is_ready = True
                    self._last_ready_at = time.monotonic()
                    self._changed.notify_all()
                    return
                is_held = self._is_held
            self._await_order(worker.actor.control.remote("hold" if is_held else "resume"))

    def _check_place(self, place: RayWorkerPlace) -> None:
        if place.version != (own := load_package_version()):
            raise RolloutError(
                f"Node {place.address} has openenv {place.version}, this process {own}: install the same"
            )
        host = "" if self.model is None else urlsplit(self.model.base_url).hostname or ""
        if is_loopback(host) and place.address not in ("127.0.0.1", self._ray.util.get_node_ip_address()):
            logger.warning(
                "node %s cannot reach the model at %s, which is a loopback address: use an address that all nodes can "
                "reach",
                place.address,
                host,
            )

    def _report_install(self, message: str) -> None:
        try:
            self._on_install(message)
        except Exception:  # an error in the caller's code must not stop the worker
            logger.exception("a callback for installations failed")

    def _acquire(self, cancel: Cancellation, failed_nodes: set[str]) -> _Worker:
        """Wait for a free place and take it, on the least loaded worker of the least loaded node.

        A rollout that failed on some nodes waits for another node, if the cluster has one.

        Raises:
            RolloutCancelled: while waiting.
            RolloutError, SandboxUnavailable, AgentUnavailable: no worker is left, and none will start.
        """
        with cancel.on_cancel(self._wake), self._changed:
            while True:
                cancel.check()
                if self._is_closed:
                    raise RolloutCancelled("the engine is closed")
                ready = [worker for worker in self._workers if worker.is_ready]
                elsewhere = [worker for worker in ready if _node_id(worker) not in failed_nodes]
                free = [worker for worker in elsewhere or ready if worker.load < self._places]
                if free:
                    loads: Counter[str] = Counter()
                    for worker in ready:
                        loads[_node_id(worker)] += worker.load
                    chosen = min(free, key=lambda worker: (worker.load, loads[_node_id(worker)]))
                    chosen.load += 1
                    return chosen
                if not ready:
                    self._check_hope()
                self._changed.wait(_NOTICE_S)

    def _check_hope(self) -> None:
        """Raise an error if waiting for a worker is pointless."""
        if not self._workers and self._unusable is not None:
            raise self._unusable
        waited_s = time.monotonic() - self._last_ready_at
        if waited_s > self._cluster.start_timeout_s:
            raise RolloutError(
                f"The Ray cluster has started no worker for {waited_s:.0f} s. One needs {self._cluster.demand()}, and "
                f"the cluster has free: {self._ray.available_resources()}. Add a node, reserve less (cpus, resources "
                "of RayCluster), or allow more time (start_timeout_s)."
            )

    def _release(self, worker: _Worker) -> None:
        with self._changed:
            worker.load -= 1
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _replace(self, worker: _Worker, reason: str) -> None:
        """Start another worker in place of a lost one. Only the first rollout that notices the loss does so."""
        if not self._remove(worker):
            return
        logger.warning("the worker on %s was lost, another is started: %s", worker.node, reason)
        self._start_worker(_STARTS if worker.is_ready else worker.starts_left)

    def _give_up(self, worker: _Worker, error: BaseException) -> None:
        """Remove a worker because its node cannot run rollouts."""
        if self._remove(worker, error):
            logger.warning("%s runs no rollouts: %s", worker.node, error)

    def _remove(self, worker: _Worker, error: BaseException | None = None) -> bool:
        """Remove a worker from the list; return False if it was removed before, or the engine is closed."""
        with self._changed:
            if worker not in self._workers or self._is_closed:
                return False
            self._workers.remove(worker)
            self._unusable = error or self._unusable
            if worker.is_ready:
                self._last_ready_at = time.monotonic()
            self._changed.notify_all()
        self._kill(worker)
        return True

    def _kill(self, worker: _Worker) -> None:
        with contextlib.suppress(Exception):  # Ray raises various errors if the actor has died
            self._ray.kill(worker.actor)

    def _close_workers(self) -> None:
        """Close the workers' sandboxes and scratch folders, then end their processes."""
        with self._changed:
            self._is_closed = True
            workers = list(self._workers)
            self._changed.notify_all()
        closing = [worker.actor.close.remote() for worker in workers if worker.is_ready]
        try:
            if closing:
                self._ray.wait(closing, num_returns=len(closing), timeout=2 * _CLOSE_S)
        finally:
            for worker in workers:
                self._kill(worker)


@dataclass(frozen=True, slots=True)
class _RemoteRollout:
    """The driver's part of a rollout: its options, and the files that arrive from the workers."""

    task: Task
    rollout_id: str
    metadata: Mapping[str, Any] | None
    reporter: Reporter
    cancel: Cancellation
    folder: Path
    started_at: float = field(default_factory=time.time)

    def take(self, part: Progress | FilePart) -> None:
        """Report an event, or write a part of a file."""
        if isinstance(part, FilePart):
            path = self.folder / part.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(part.data)
        else:
            self.reporter.phase = part.phase
            self.reporter.say(part.message, turn=part.turn, facts=part.facts)

    def journal(self) -> bytes:
        """Return the journal of the last attempt, as far as it arrived."""
        path = self.folder / _JOURNAL
        return path.read_bytes() if path.is_file() else b""

    def forget_files(self) -> None:
        """Remove the files of a failed attempt before the next one."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()


def _node_id(worker: _Worker) -> str:
    return "" if worker.place is None else worker.place.node_id


def _words(error: Exception) -> str:
    """Return the first paragraph of a message from Ray, in one line."""
    return " ".join(str(error).strip().split("\n\n")[0].split())[:500] or type(error).__name__
