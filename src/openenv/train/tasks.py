"""`rollouts`: coding agents work on tasks, many at once; their samples arrive in groups.

    tasks ──> groups of `samples` ──> `Engine`: sandbox, setup (once per group), agent, verifier ──> groups (`stream`)

A failure of a sandbox, a setup, the endpoint or the verifier is never scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError
from typing_extensions import Unpack

from openenv.errors import RolloutError
from openenv.rollout.progress import Cancellation, OnProgress
from openenv.rollout.run.batch import BatchOptions, cluster_engine, process_engine, take_options
from openenv.rollout.run.engine import Engine, EngineArguments, EngineOptions, in_thread
from openenv.rollout.run.process_engine import ProcessEngine
from openenv.rollout.run.shared_setup import SetupGroup, setup_key
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import BranchPoint, Task
from openenv.sandboxes.base import sweep_snapshots

from .groups import EpisodeSample, SampleGroup
from .stream import GroupStream, OpenGroup, StreamArguments, StreamOptions, model_to_train

if TYPE_CHECKING:
    from openenv.providers.ray_cluster import RayCluster
    from openenv.rollout.run.ray_engine import RayEngine

TaskLike = Task | Mapping[str, Any]
"""A task, or its fields as in the Task API."""


class TaskStreamArguments(StreamArguments, EngineArguments, total=False):
    """The keyword arguments of `rollouts`."""


@contextlib.asynccontextmanager
async def rollouts(
    tasks: Iterable[TaskLike],
    *,
    share_setup: bool = True,
    processes: int | None = None,
    on: Literal["ray"] | RayCluster | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[TaskStreamArguments],
) -> AsyncIterator[RolloutStream]:
    """Run agents on tasks; yield a stream of groups, each as soon as its last rollout ends.

    Rollouts start with the first request for a group. While the trainer is busy, at most `max_ahead` groups are started
    or wait for it.

    Args:
        tasks: One group per task, read when it is needed: an endless iterator, or a `Curriculum`, is fine.
        share_setup: Run the setup of a task once per group; pass False if the setup must differ between rollouts.
        processes: The number of worker processes that run the rollouts; None runs them in this process. If a worker
            dies, its rollouts fail as `sandbox_failed`, and the stream repeats them.
        on: `ray`, or a `RayCluster`, to run the rollouts on the nodes of a cluster.
        on_progress: Called with the events of all rollouts; `rollout_id` tells them apart.
        options: The fields of `StreamOptions`, such as `samples`, and of `EngineOptions`, such as `agent`, `model` and
            `store`. A model without `sampling` samples from its own distribution (`Sampling()`).

    Raises:
        ValueError: an option is out of range, or the agent needs a model and has none.
        AgentUnavailable, SandboxUnavailable: the agent, or the backend, cannot run here.
        RolloutError: while the stream runs: every rollout failed with all its retries, or as many in a row as run at
            once (at least 4, of 3 groups). The text names the last reason.
    """
    arguments: dict[str, Any] = {**options}
    groups = take_options(StreamOptions, arguments)
    engine = EngineOptions(**arguments)
    if engine.model is not None:
        engine = replace(engine, model=model_to_train(engine.model))
    shared: Engine | ProcessEngine | RayEngine
    # The stream repeats failed rollouts, so the engines do not.
    batch = BatchOptions(concurrency=groups.concurrency, processes=processes, share_setup=share_setup, on=on)
    if processes is not None:
        shared = process_engine(engine, batch, retries=0 if engine.store is None else 1)  # with a store, it continues
    elif on is None:
        shared = Engine(engine)
    else:
        shared = cluster_engine(engine, replace(batch, retries=0))
    async with _entered(shared):
        stream = RolloutStream(
            tasks, groups, shared, share_setup=share_setup, on_progress=on_progress, engine_options=engine
        )
        async with stream:
            yield stream


@contextlib.asynccontextmanager
async def _entered(engine: Engine | ProcessEngine | RayEngine) -> AsyncIterator[None]:
    """Enter and leave an engine in threads: it may have to install its agent, which takes minutes."""
    entering = asyncio.create_task(asyncio.to_thread(engine.__enter__))
    try:
        await asyncio.shield(entering)
        yield
    finally:
        await asyncio.wait({entering})  # a thread cannot be cancelled
        if entering.exception() is None:
            await asyncio.to_thread(engine.__exit__, None, None, None)


class RolloutStream(GroupStream[TaskLike]):
    """Groups of rollouts, each as soon as its last rollout ends: `async for group in stream`. `rollouts` creates it."""

    def __init__(
        self,
        tasks: Iterable[TaskLike],
        options: StreamOptions,
        engine: Engine | ProcessEngine | RayEngine,
        *,
        share_setup: bool,
        on_progress: OnProgress | None,
        engine_options: EngineOptions,
    ) -> None:
        store = engine_options.store if isinstance(engine_options.store, RolloutStore) else None  # no other can be read
        # The engines of other processes pause the proxies of their workers.
        proxy = engine.capture if isinstance(engine, Engine) else engine
        super().__init__(tasks, options, proxy, store, engine_options.model)
        self._engine = engine
        self._shares_setup = share_setup and isinstance(engine, Engine)  # other workers share setups themselves
        self._on_progress = on_progress
        self._setups: dict[int, SetupGroup] = {}
        self._reading = threading.Lock()
        self._interrupted: dict[tuple[str, int], str] | None = None  # of a resumed stream; read once

    async def __aenter__(self) -> RolloutStream:
        if self._shares_setup:
            await asyncio.to_thread(sweep_snapshots)  # left by processes that were killed
        await super().__aenter__()
        return self

    def checked(self, item: TaskLike, number: int) -> Task:
        try:
            task = item if isinstance(item, Task) else Task.model_validate(dict(item))
        except (ValidationError, TypeError, ValueError) as exc:
            raise RolloutError(f"Item {number} of the tasks is not a task: {exc}") from exc
        self._engine.require_trust(task)
        return task

    def name_of(self, item: TaskLike, number: int) -> str:
        return _task(item).task_id or f"task-{number}"

    def whole(self, group: OpenGroup[TaskLike]) -> SampleGroup:
        return SampleGroup(group.name, {}, group.chosen(), group.failed, _task(group.item))

    async def finish_group(self, group: OpenGroup[TaskLike]) -> None:
        setup = self._setups.pop(group.number, None)
        if setup is not None:
            await asyncio.to_thread(setup.close)

    async def sample(self, worker: int, group: OpenGroup[TaskLike], index: int, attempt: int) -> EpisodeSample:
        task, cancel = _task(group.item), Cancellation()
        setup = self._setup(group, task)

        def run() -> EpisodeSample:
            arguments: dict[str, Any] = {"on_progress": self._on_progress, "cancel": cancel}
            if setup is not None:
                arguments["setup_group"] = setup
            begun = self._take_interrupted(group.label, index)
            if begun is not None and isinstance(self._engine, Engine):
                outcome = self._engine.resume(begun, **arguments)
            else:
                if begun is not None:  # a worker process continues it
                    arguments["rollout_id"] = begun
                if (failed := self._failure_with_answers(group, index)) is not None:
                    arguments["start"] = BranchPoint(failed, is_branch=False)
                outcome = self._engine.run(task, metadata=group.labels(index, attempt), **arguments)
            return EpisodeSample(outcome, outcome.sequences)

        return await in_thread(run, cancel)

    def _failure_with_answers(self, group: OpenGroup[TaskLike], index: int) -> str | None:
        """Return the failed attempt whose answers the agent of a retry gets."""
        if self._store is None or not isinstance(self._engine, Engine | ProcessEngine):
            return None
        failed = [each.outcome for each in group.failed if each.outcome.metadata.get("sample") == index]
        if not failed or not (self._store.captures / failed[-1].rollout_id).is_dir():
            return None
        return failed[-1].rollout_id

    def _take_interrupted(self, label: str, index: int) -> str | None:
        """Return the rollout of a sample that was running when its process died; None for a new sample."""
        if self._store is None or not self._source.is_resumed or not isinstance(self._engine, Engine | ProcessEngine):
            return None
        with self._reading:
            if self._interrupted is None:
                self._interrupted = {
                    (str(each.metadata.get("group")), int(each.metadata.get("sample", -1))): each.rollout_id
                    for each in self._store.running()
                    if not each.is_running and "sample" in each.metadata and self._store.is_begun(each.rollout_id)
                }
            return self._interrupted.pop((label, index), None)

    def _setup(self, group: OpenGroup[TaskLike], task: Task) -> SetupGroup | None:
        """Return the shared setup of a group, or None; a retry replaces a setup that failed."""
        if not self._shares_setup or setup_key(task) is None:
            return None
        setup = self._setups.get(group.number)
        if setup is None or (setup.result is not None and setup.result.failure is not None):
            setup = self._setups[group.number] = SetupGroup(group.planned)
        return setup


def _task(item: TaskLike) -> Task:
    """Return the task of a group; `checked` has made it one."""
    assert isinstance(item, Task)
    return item
