"""`rollouts`: coding agents work on tasks, many at once, and what they sampled comes as groups.

    tasks ──> groups of `samples` ──> `Engine`: sandbox, setup (once per group), agent, verifier ──> groups (`stream`)

A failure of a sandbox, a setup, the endpoint or the verifier never becomes a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError
from typing_extensions import Unpack

from openenv.errors import RolloutError
from openenv.rollout.cancellation import Cancellation
from openenv.rollout.run.engine import Engine, EngineOptions, cluster_engine, in_thread
from openenv.rollout.run.progress import OnProgress
from openenv.rollout.run.shared_setup import SetupGroup, setup_key
from openenv.rollout.tasks.task import Task
from openenv.sandboxes.base import sweep_snapshots

from .groups import EpisodeSample, SampleGroup
from .stream import GroupStream, OpenGroup, StreamOptions, model_to_train

if TYPE_CHECKING:
    from openenv.providers.ray_cluster import RayCluster
    from openenv.rollout.run.ray_engine import RayEngine

TaskLike = Task | Mapping[str, Any]
"""A task, or its fields, as the Task API has them."""


@contextlib.asynccontextmanager
async def rollouts(
    tasks: Iterable[TaskLike],
    *,
    samples: int = 8,
    concurrency: int = 64,
    retries: int = 2,
    oversample: int = 0,
    max_staleness: int | None = None,
    keep: Callable[[SampleGroup], bool] | None = None,
    on_failed: Callable[[SampleGroup], object] | None = None,
    share_setup: bool = True,
    on: Literal["ray"] | RayCluster | None = None,
    on_progress: OnProgress | None = None,
    **engine: Unpack[EngineOptions],
) -> AsyncIterator[RolloutStream]:
    """Let an agent work on tasks; yields a stream of groups, each as soon as its last rollout has ended.

    Rollouts begin as groups are taken: while a trainer is busy, no more of them than `concurrency` and as many that
    have ended are ahead of it.

    Args:
        tasks: A group for each, taken as they are needed: it may be endless, or a `Curriculum`.
        samples: How many rollouts a group has.
        concurrency: How many rollouts run at once.
        retries: How often a rollout is run again that failed for reasons that are not the policy's: `env_failed`,
            `sandbox_failed`, `grader_failed`.
        oversample: How many more rollouts a group begins with; when `samples` of them have a reward, the others are
            cancelled. Saves the wait for the slowest, and prefers short rollouts.
        max_staleness: By how many versions (`stream.policy_version`, numbers that the endpoint names) the policy that
            sampled a group may be behind; older groups are left out, and counted.
        keep: Says of a group whether it is wanted, such as `lambda group: group.spread > 0`.
        on_failed: Takes the groups without any reward, which the stream leaves out.
        share_setup: Run the setup of a task once per group; pass False for setups that must differ between rollouts.
        on: `ray`, or a `RayCluster`, to run them on the nodes of a cluster.
        on_progress: Gets the events of all; `rollout_id` tells them apart.
        engine: The arguments of `Engine`: `agent`, `model`, `sandbox`, `store` and so on. A model that names no
            sampling samples from its own distribution (`Sampling()`).

    Raises:
        ValueError: an argument is out of range, or the agent needs a model and there is none.
        AgentUnavailable, SandboxUnavailable: the agent, or the backend, cannot run here.
        RolloutError: while it runs: as many rollouts failed in a row as run at once (at least 4, of 3 groups), with all
            their retries, or all failed; the last reason is named.
    """
    options = StreamOptions(samples, concurrency, oversample, retries, max_staleness, keep, on_failed)
    model = engine.get("model")
    if model is not None:
        engine["model"] = model_to_train(model)
    shared: Engine | RayEngine
    # The stream repeats what failed, so a cluster does not.
    shared = Engine(**engine) if on is None else cluster_engine(on, concurrency, 0, share_setup, engine)
    async with _entered(shared):
        stream = RolloutStream(tasks, options, shared, share_setup=share_setup, on_progress=on_progress)
        async with stream:
            yield stream


@contextlib.asynccontextmanager
async def _entered(engine: Engine | RayEngine) -> AsyncIterator[None]:
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
    """Groups of rollouts, as they end: `async for group in stream`. Made by `rollouts`."""

    def __init__(
        self,
        tasks: Iterable[TaskLike],
        options: StreamOptions,
        engine: Engine | RayEngine,
        *,
        share_setup: bool,
        on_progress: OnProgress | None,
    ) -> None:
        is_local = isinstance(engine, Engine)
        super().__init__(tasks, options, engine.capture if isinstance(engine, Engine) else None)
        self._engine = engine
        self._shares_setup = share_setup and is_local  # the workers of a cluster share by themselves
        self._on_progress = on_progress
        self._tasks: dict[int, Task] = {}
        self._setups: dict[int, SetupGroup] = {}

    async def __aenter__(self) -> RolloutStream:
        if self._shares_setup:
            await asyncio.to_thread(sweep_snapshots)  # of processes that were killed
        await super().__aenter__()
        return self

    def name_of(self, item: TaskLike, number: int) -> str:
        try:
            task = item if isinstance(item, Task) else Task.model_validate(dict(item))
        except (ValidationError, TypeError, ValueError) as exc:
            raise RolloutError(f"Item {number} of the tasks is no task: {exc}") from exc
        self._engine.require_trust(task)
        self._tasks[number] = task
        return task.task_id or f"task-{number}"

    def whole(self, group: OpenGroup[TaskLike]) -> SampleGroup:
        task = self._tasks.pop(group.number)
        return SampleGroup(group.name, {}, group.chosen(), group.failed, task)

    async def finish_group(self, group: OpenGroup[TaskLike]) -> None:
        setup = self._setups.pop(group.number, None)
        if setup is not None:
            await asyncio.to_thread(setup.close)

    async def sample(self, worker: int, group: OpenGroup[TaskLike], index: int, attempt: int) -> EpisodeSample:
        task, cancel = self._tasks[group.number], Cancellation()
        setup = self._setup(group, task)

        def run() -> EpisodeSample:
            arguments: dict[str, Any] = {} if setup is None else {"setup_group": setup}
            outcome = self._engine.run(
                task,
                on_progress=self._on_progress,
                cancel=cancel,
                metadata=group.labels(index, attempt),
                **arguments,
            )
            return EpisodeSample(outcome, outcome.sequences)

        return await in_thread(run, cancel)

    def _setup(self, group: OpenGroup[TaskLike], task: Task) -> SetupGroup | None:
        """Return what the rollouts of a group share their setup by; a setup that failed is run again by a retry."""
        if not self._shares_setup or setup_key(task) is None:
            return None
        setup = self._setups.get(group.number)
        if setup is None or (setup.result is not None and setup.result.failure is not None):
            setup = self._setups[group.number] = SetupGroup(group.planned)
        return setup
