"""`run_many`: many rollouts at once, in this process, in worker processes or on a Ray cluster.

Knows how tasks are handed out to threads and which rollouts share a setup. `engine` runs each rollout.
"""

# A task of a batch:
#
#   listed ──> deferred ──> running ──> outcome
#      │                       ▲
#      └───────────────────────┘
#
# A task is deferred if another rollout is running the same setup now, and other tasks could use the thread meanwhile.
# Later it starts from a snapshot of that setup. Threads take one task after another: a generator is never read ahead.

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from typing_extensions import Unpack

from openenv.errors import RolloutError, TaskRefused
from openenv.rollout.progress import Cancellation, OnProgress
from openenv.rollout.run.engine import (
    Engine,
    EngineArguments,
    EngineOptions,
    ProgressBar,
    call_both,
    in_thread,
    new_rollout_id,
)
from openenv.rollout.run.shared_setup import SetupGroup, SharedSetups, setup_key
from openenv.rollout.run.validation import Validation
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.store.store import RolloutStore, stored_outcome
from openenv.rollout.tasks.task import BranchPoint, Task
from openenv.sandboxes.host import sync_path, try_locked

if TYPE_CHECKING:
    from openenv.providers.ray_cluster import RayCluster
    from openenv.rollout.run.process_engine import ProcessEngine
    from openenv.rollout.run.ray_engine import RayEngine

OnOutcome = Callable[[int, Outcome], None]
CONCURRENCY = 4
_NOTICE_S = 0.5  # how late a Ctrl-C may be noticed
_OptionsT = TypeVar("_OptionsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The options of `run_many`, in addition to `EngineOptions`."""

    concurrency: int | None = None
    """The number of rollouts at once: by default 4 or `processes`, on Ray one for each free processor of the whole
    cluster."""
    processes: int | None = None
    """The number of worker processes that run the rollouts; None runs them in this process. If a worker dies, each of
    its rollouts is repeated once. Rollouts share a setup if one worker runs them at the same time."""
    share_setup: bool = True
    """Run equal setups once. Pass False if a setup must differ between rollouts, for example because it draws random
    numbers. On Ray, rollouts share a setup if one worker runs them at the same time."""
    on: Literal["ray"] | RayCluster | None = None
    """`ray` or a `RayCluster` runs the rollouts on the nodes of a cluster (see `RayEngine`); None on this machine."""
    retries: int | None = None
    """On Ray, how often a rollout is repeated that ended as `sandbox_failed` or lost its node; by default 2. Rollouts
    with other outcomes are never repeated."""
    on_progress: OnProgress | None = None
    """Called with the events of all rollouts, one call at a time; `rollout_id` tells them apart."""
    on_outcome: OnOutcome | None = None
    """Called with the number of a task and its outcome as soon as it ends, one call at a time."""
    cancel: Cancellation | None = None
    """Ends all running rollouts. Tasks that have not started get the status `cancelled`, unless they come from a
    generator."""
    metadata: Mapping[str, Any] | None = None
    """Labels that are stored with each outcome."""
    start: BranchPoint | None = None
    """Start each rollout at a call of another rollout of the store (`StoredRollout.branch`)."""
    progress: bool = False
    """Show a bar in a terminal or a notebook: installations, finished rollouts, mean reward."""
    resume: bool = False
    """Continue the newest run of the store, with the same tasks: finished rollouts are read, interrupted ones get their
    recorded answers again, the others are run. Without such a run, this is a new one."""

    def __post_init__(self) -> None:
        if self.resume and self.on is not None:
            raise ValueError("resume is for rollouts of this machine: the records of a cluster are on its nodes")
        if self.start is not None and self.on is not None:
            raise ValueError("start is for rollouts of this machine: the nodes of a cluster do not have the records")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        if self.retries is not None and self.on is None:
            raise ValueError("retries needs a cluster: pass on='ray' as well")
        if self.processes is not None and self.processes < 1:
            raise ValueError("processes must be at least 1")
        if self.processes is not None and self.on is not None:
            raise ValueError("processes is for this machine: pass either processes or on")


class BatchArguments(TypedDict, total=False):
    """The fields of `BatchOptions` as keyword arguments; mypy compares both lists."""

    concurrency: int | None
    processes: int | None
    share_setup: bool
    on: Literal["ray"] | RayCluster | None
    retries: int | None
    on_progress: OnProgress | None
    on_outcome: OnOutcome | None
    cancel: Cancellation | None
    metadata: Mapping[str, Any] | None
    start: BranchPoint | None
    progress: bool
    resume: bool


class RunManyArguments(BatchArguments, EngineArguments, total=False):
    """The keyword arguments of `run_many`."""


def take_options(kind: type[_OptionsT], arguments: dict[str, Any]) -> _OptionsT:
    """Move the fields of an options dataclass from keyword arguments into an object of it.

    The dataclass that takes the last arguments refuses unknown names.
    """
    names = [field.name for field in fields(kind) if field.name in arguments]  # type: ignore[arg-type]
    return kind(**{name: arguments.pop(name) for name in names})


def run_many(tasks: Iterable[Task], **options: Unpack[RunManyArguments]) -> list[Outcome]:
    """Run tasks, several at once, and return their outcomes in the order of the tasks.

    If tasks have the same files and setup lines, such as several copies of one task, the setup runs once. Each of their
    rollouts then starts in a fresh sandbox with a snapshot of the result. Every rollout runs its own setup if the
    backend has no snapshots, or if the setup starts processes such as a server.

    Args:
        tasks: The tasks. A generator is advanced only when a thread is free.
        options: The fields of `BatchOptions`, such as `concurrency`, and of `EngineOptions`, such as `agent`.

    Raises:
        TrustError: a check of a task has a lower trust level than required. Nothing was run, unless `tasks` is a
            generator.
        TaskRefused: a check fails on its task's own solution. No agent was run, unless `tasks` is a generator or other
            processes run the rollouts.
        StoreError: an outcome could not be stored; the running rollouts were cancelled.
        RolloutError: on Ray: Ray is not installed, the cluster does not exist, or it started no worker in time.
    """
    arguments: dict[str, Any] = {**options}
    batch = take_options(BatchOptions, arguments)
    cancel, on_progress, on_outcome = batch.cancel or Cancellation(), batch.on_progress, batch.on_outcome
    sized = list(tasks) if isinstance(tasks, Sized) else None
    # The pool ends before the engine, so no rollout runs when snapshots, proxy and scratch folder are removed.
    with contextlib.ExitStack() as stack:
        if batch.progress:
            bar = stack.enter_context(ProgressBar(None if sized is None else len(sized)))
            on_progress, on_outcome = call_both(bar.on_progress, on_progress), call_both(bar.on_outcome, on_outcome)
            arguments["on_install"] = call_both(bar.on_install, arguments.get("on_install"))
        engine = EngineOptions(**arguments)
        shared: Engine | ProcessEngine | RayEngine
        setups: SharedSetups | None = None
        if batch.processes is not None:
            concurrency = batch.concurrency or max(CONCURRENCY, batch.processes)
            shared = stack.enter_context(process_engine(engine, replace(batch, concurrency=concurrency)))
        elif batch.on is None:
            shared, concurrency = stack.enter_context(Engine(engine)), batch.concurrency or CONCURRENCY
            setups = stack.enter_context(SharedSetups(sized)) if batch.share_setup else None
        else:
            shared = stack.enter_context(cluster_engine(engine, batch))
            concurrency = shared.concurrency
        pool = stack.enter_context(ThreadPoolExecutor(concurrency, "openenv-rollout"))
        for task in sized or ():
            shared.require_trust(task)
            shared.require_sandboxes(task)
        if isinstance(shared, Engine):  # other workers validate the checks of a task before its first agent
            _validate(shared, sized or (), pool, cancel)
        run_file = None
        if isinstance(engine.store, RolloutStore) and batch.on is None:
            run_file = stack.enter_context(RunFile(engine.store, resume=batch.resume))
        run = _Batch(
            shared,
            tasks if sized is None else sized,
            setups,
            _Callbacks(on_progress, on_outcome, cancel, batch.metadata, batch.start, engine.seed is not None),
            run_file,
        )
        try:
            # This loop waits, and not the end of the pool, which joins its threads: Python up to 3.12 takes a thread
            # for ended if Ctrl-C interrupts its `join`. Each wait is short, because a signal that another thread of
            # the process receives does not end it: Ctrl-C would be noticed only after the last rollout.
            running = {pool.submit(run.work) for _ in range(concurrency)}
            while running:
                running = wait(running, timeout=_NOTICE_S).not_done
        except BaseException:  # Ctrl-C, or the process has too many threads
            cancel.cancel("interrupted")
            raise
    if run.error is not None:
        raise run.error
    return [outcome for _, outcome in sorted(run.outcomes.items())]


def _validate(engine: Engine, tasks: Iterable[Task], pool: ThreadPoolExecutor, cancel: Cancellation) -> None:
    """Validate the checks of all tasks, several at once.

    Raises:
        TaskRefused: a check fails on its task's own solution. The text names all such tasks.
    """
    stop = Cancellation()  # a refused task does not cancel the caller's `cancel`
    with cancel.on_cancel(lambda: stop.cancel(cancel.reason)):
        distinct = {id(task): task for task in tasks}  # equal tasks wait for each other
        waiting = {pool.submit(engine.validate, task, stop) for task in distinct.values()}
        ended: set[Future[Validation]] = set()
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_NOTICE_S)
                ended |= done
        except BaseException:
            stop.cancel("interrupted")
            raise
    errors = [error for each in ended if (error := each.exception()) is not None]
    refusals = [str(error) for error in errors if isinstance(error, TaskRefused)]
    for error in errors:
        if not isinstance(error, TaskRefused):
            raise error
    if refusals:
        raise TaskRefused("\n".join(sorted(refusals)))


def cluster_engine(engine: EngineOptions, batch: BatchOptions) -> RayEngine:
    """Return an engine that runs rollouts on the cluster that `batch.on` names."""
    from openenv.providers.ray_cluster import RayCluster  # most rollouts need no cluster
    from openenv.rollout.run.ray_engine import RETRIES, RayEngine

    if batch.on != "ray" and not isinstance(batch.on, RayCluster):
        raise ValueError(f"on must be 'ray' or a RayCluster, not {batch.on!r}")
    return RayEngine(
        engine,
        cluster=None if batch.on == "ray" else batch.on,
        concurrency=batch.concurrency,
        retries=RETRIES if batch.retries is None else batch.retries,
        share_setup=batch.share_setup,
    )


def process_engine(engine: EngineOptions, batch: BatchOptions, *, retries: int = 1) -> ProcessEngine:
    """Return an engine with `batch.processes` worker processes; `retries` counts lost workers only."""
    from openenv.rollout.run.process_engine import ProcessEngine  # most rollouts need one process

    return ProcessEngine(
        engine,
        processes=batch.processes or 1,
        concurrency=batch.concurrency or CONCURRENCY,
        retries=retries,
        share_setup=batch.share_setup,
    )


async def run_many_async(
    tasks: Iterable[Task], *, cancel: Cancellation | None = None, **arguments: Any
) -> list[Outcome]:
    """Run tasks outside the event loop; takes the arguments of `run_many`.

    Cancelling the coroutine ends all rollouts and frees everything before the coroutine ends.
    """
    cancel = cancel or Cancellation()
    return await in_thread(lambda: run_many(tasks, cancel=cancel, **arguments), cancel)


class RunFile:
    """The rollouts of a batch by the numbers of their tasks, in its store, so that another process can continue it.

        runs/20261119T041200-0002-9f3c.jsonl  locked while its process lives; a torn last line is ignored
        {"number":0,"rollout_id":"a41f..."}   written before the rollout begins
        {"number":1,"rollout_id":"77b0..."}

    Args:
        store: The store of the rollouts.
        resume: Continue the newest file, if there is one.

    Raises:
        RolloutError: another process runs this batch.
    """

    def __init__(self, store: RolloutStore, *, resume: bool) -> None:
        self.store = store
        folder = store.root / "runs"
        folder.mkdir(exist_ok=True)
        # The newest file has the last name, also of two in one second, and after the clock was set back.
        names = sorted(path.stem for path in folder.glob("*.jsonl"))
        stamp = max([time.strftime("%Y%m%dT%H%M%S", time.gmtime()), *(name[:15] for name in names[-1:])])
        new = f"{stamp}-{len(names):04}-{secrets.token_hex(2)}"
        path = folder / f"{names[-1] if resume and names else new}.jsonl"
        handle = try_locked(path)
        if handle is None:
            raise RolloutError(f"Another process runs the batch {path.stem} of this store; wait for its end")
        self._handle = handle
        self._rollouts: dict[int, str] = {}
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):
                entry = json.loads(line)
                self._rollouts[int(entry["number"])] = str(entry["rollout_id"])
        os.lseek(handle, 0, os.SEEK_END)
        sync_path(folder)
        if self._rollouts:
            os.write(handle, b"\n")  # ends a line that a killed process left torn

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._handle)

    def earlier(self, number: int, task: Task) -> str | None:
        """Return the rollout of a task that was begun before.

        Raises:
            RolloutError: it has another task.
        """
        rollout_id = self._rollouts.get(number)
        if rollout_id is None or not self.store.is_begun(rollout_id):
            return None
        stored = self.store.task(rollout_id)
        if stored.model_dump(mode="json", exclude={"metadata"}) != task.model_dump(mode="json", exclude={"metadata"}):
            raise RolloutError(
                f"Task {number} ('{task.task_id}') is not the one that the run began with ('{stored.task_id}'): resume "
                f"needs the same tasks in the same order"
            )
        return rollout_id

    def begin(self, number: int, rollout_id: str) -> None:
        """Note the rollout of a task."""
        os.write(self._handle, json.dumps({"number": number, "rollout_id": rollout_id}).encode() + b"\n")
        os.fsync(self._handle)  # after a power cut, the task must not begin a second rollout


@dataclass(slots=True)
class _BatchTask:
    """A task of a batch."""

    number: int
    task: Task
    setup_key: str | None
    labels: Mapping[str, Any]
    """More metadata of its rollout."""
    group: SetupGroup | None = None
    """The rollouts with the same setup; set when a thread takes the task."""


@dataclass(frozen=True, slots=True)
class _Callbacks:
    """The callbacks, cancellation and labels that all rollouts of a batch share."""

    on_progress: OnProgress | None
    on_outcome: OnOutcome | None
    cancel: Cancellation
    metadata: Mapping[str, Any] | None
    start: BranchPoint | None
    is_repeatable: bool


class _Batch:
    """The tasks of one `run_many` and their outcomes; its threads share it."""

    def __init__(
        self,
        engine: Engine | ProcessEngine | RayEngine,
        tasks: Iterable[Task],
        setups: SharedSetups | None,
        callbacks: _Callbacks,
        run_file: RunFile | None,
    ) -> None:
        self._engine, self._setups, self._callbacks = engine, setups, callbacks
        self._run_file = run_file
        self._cancel = callbacks.cancel
        self._tasks: Iterator[tuple[int, Task]] = enumerate(tasks)
        self._is_finite = isinstance(tasks, Sized)
        self._deferred: list[_BatchTask] = []
        self._samples: Counter[str] = Counter()  # of each item
        self._lock = threading.Lock()
        self.outcomes: dict[int, Outcome] = {}
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run one task after another until none is left."""
        try:
            while (entry := self._next()) is not None:
                try:
                    outcome = self._run(entry)
                finally:
                    if self._setups is not None:
                        self._setups.leave(entry.setup_key)
                with self._lock:
                    self.outcomes[entry.number] = outcome
                    if self._callbacks.on_outcome is not None:
                        self._callbacks.on_outcome(entry.number, outcome)
        except BaseException as exc:  # raised by the task list, the store or a callback, not by a rollout
            with self._lock:
                self.error = self.error or exc
            self._cancel.cancel(f"another rollout could not be handled: {exc}")

    def _next(self) -> _BatchTask | None:
        with self._lock:
            if self.error is not None or (self._cancel.cancelled and not self._is_finite):
                return None
            entry = self._choose()
            if entry is not None and self._setups is not None:
                entry.group = self._setups.join(entry.setup_key)
            return entry

    def _choose(self) -> _BatchTask | None:
        """Return the next task. A task whose setup is running comes last: its thread could only wait."""
        for position, entry in enumerate(self._deferred):
            if not self._would_wait(entry):
                return self._deferred.pop(position)
        for number, task in self._tasks:
            entry = _BatchTask(number, task, setup_key(task), self._labels(task))
            if not (self._is_finite and self._would_wait(entry)):  # a generator is not read ahead
                return entry
            self._deferred.append(entry)
        return self._deferred.pop(0) if self._deferred else None

    def _labels(self, task: Task) -> Mapping[str, Any]:
        """Return the labels that identify a rollout in every run of the same batch: its item, and its number there.

        A batch without a seed needs none.
        """
        if not self._callbacks.is_repeatable:
            return {}
        item = task.task_id or "task"
        sample = self._samples[item]
        self._samples[item] += 1
        return {"item": item, "sample": sample}

    def _would_wait(self, entry: _BatchTask) -> bool:
        return self._setups is not None and self._setups.is_pending(entry.setup_key)

    def _run(self, entry: _BatchTask) -> Outcome:
        task, callbacks = entry.task, self._callbacks
        if self._cancel.cancelled:
            return Outcome(
                rollout_id=new_rollout_id(),
                task_id=task.task_id,
                status="cancelled",
                phase="sandbox",
                reason=self._cancel.reason,
                agent=self._engine.agent.name,
            )
        metadata = {**entry.labels, **(callbacks.metadata or {})} or None
        options: dict[str, Any] = {"on_progress": callbacks.on_progress, "cancel": self._cancel}
        if entry.group is not None:
            assert isinstance(self._engine, Engine)  # other workers form groups themselves
            options["setup_group"] = entry.group
        start: dict[str, Any] = {} if callbacks.start is None else {"start": callbacks.start}  # not for `RayEngine`
        if self._run_file is None:
            return self._engine.run(task, metadata=metadata, **options, **start)
        earlier = self._run_file.earlier(entry.number, task)
        if earlier is not None:
            stored = stored_outcome(self._run_file.store, earlier)
            if stored is not None and stored.status != "cancelled":
                return stored
            if stored is None and isinstance(self._engine, Engine):
                return self._engine.resume(earlier, **options)
            if stored is None:
                return self._engine.run(task, rollout_id=earlier, metadata=metadata, **options, **start)
            if (self._run_file.store.captures / earlier).is_dir():  # cancelled, but some of it may be sampled
                start = {"start": BranchPoint(earlier, is_branch=False)}
        rollout_id = new_rollout_id()
        self._run_file.begin(entry.number, rollout_id)
        return self._engine.run(task, rollout_id=rollout_id, metadata=metadata, **options, **start)
