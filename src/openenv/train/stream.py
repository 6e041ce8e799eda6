"""`GroupStream`, the base of `play` and `rollouts`: makes samples in parallel, and yields groups with the same start.

An infrastructure failure is never scored: its sample has no reward and counts in no baseline. If every sample fails,
the stream raises an error. A subclass decides how to make a sample. `Curriculum` and `shuffled` order the items.
"""

# From items to the trainer:
#
#   items ──> open groups ──> workers, one sample each ──> complete groups ──> queue ──> `__anext__` ──> trainer
#               ▲    ▲                   │                                      │           │
#               │    └── infrastructure ─┤                                      │           ├─ no reward: `on_failed`
#               │        failure: retry  │                                      │           ├─ stale: dropped
#               │                        │                                      │           └─ not wanted by `keep`:
#               └── no free session:     │                                      │              dropped
#                   returned to others ──┘                                      └─ bounded: if the trainer is slow, the
#                                                                                  workers stop (back-pressure)
#
# A sample:   planned ──> running ──> ended: a reward of the policy       ──> its group
#                │           ├──> ended: infrastructure failure           ──> retried, then in the group, no reward
#                │           └──> cancelled: its group has enough rewards ──> counted as surplus
#                └──> never started, because its group is complete
#
# The stream fails if the infrastructure fails for good: the last samples in a row, from several groups, all failed with
# all their retries. A single broken item (one group) does not stop it.

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

from openenv.client.rewards import RewardHistory
from openenv.errors import RolloutError, SessionCapacityError, message_of
from openenv.protocol.backoff import Backoff
from openenv.rollout.capture import CaptureServer
from openenv.rollout.capture.training_trace import TokenCounts
from openenv.rollout.store.outcome import Status
from openenv.rollout.tasks.task import Model, Sampling

from .groups import EpisodeSample, SampleGroup

logger = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")

INFRASTRUCTURE: frozenset[Status] = frozenset({"env_failed", "sandbox_failed", "grader_failed"})
"""Statuses of samples that failed because of the infrastructure, not because of the policy."""
_HOPELESS, _HOPELESS_GROUPS = 4, 3
"""The run ends if at least this many samples fail in a row, from this many groups. One group proves nothing: its item
may be broken while all others work."""
_NO_ROOM_S = 60.0
"""The run ends if the server has been full for this time and no worker has a session."""
_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How samples become groups. `play` and `rollouts` take these fields as keyword arguments.

    Raises:
        ValueError: a value is out of range.
    """

    samples: int = 8
    """The number of samples per group."""
    concurrency: int = 64
    """The number of samples in progress at once; fewer if the server has too few free sessions."""
    oversample: int = 0
    """Additional samples that each group starts. When `samples` of them have a reward, the others are cancelled. This
    avoids waiting for the slowest sample, and prefers short ones."""
    retries: int = 2
    """How often a sample is repeated after an infrastructure failure: of the server, the endpoint, a sandbox or a
    verifier."""
    max_staleness: int | None = None
    """How many versions the policy that sampled a group may be behind the trained one (`stream.policy_version`). Older
    groups are dropped and counted. The endpoint must number its versions."""
    keep: Callable[[SampleGroup], bool] | None = None
    """Returns whether the trainer wants a group, such as `lambda group: group.spread > 0`."""
    on_failed: Callable[[SampleGroup], object] | None = None
    """Called with each group without any reward; the stream drops these groups."""

    def __post_init__(self) -> None:
        if min(self.samples, self.concurrency) < 1:
            raise ValueError("samples and concurrency must be at least 1")
        if min(self.oversample, self.retries, self.max_staleness or 0) < 0:
            raise ValueError("oversample, retries and max_staleness must be at least 0")


class StreamArguments(TypedDict, total=False):
    """The fields of `StreamOptions` as keyword arguments; mypy compares both lists."""

    samples: int
    concurrency: int
    oversample: int
    retries: int
    max_staleness: int | None
    keep: Callable[[SampleGroup], bool] | None
    on_failed: Callable[[SampleGroup], object] | None


@dataclass(slots=True)
class StreamCounts:
    """Counts of a stream so far."""

    episodes: int = 0
    """Finished samples."""
    failed: int = 0
    """Attempts with an infrastructure failure."""
    failed_groups: int = 0
    """Groups without any reward."""
    stale_groups: int = 0
    """Groups from policy versions older than `max_staleness` allows."""
    filtered_groups: int = 0
    """Groups that `keep` refused."""
    surplus: int = 0
    """Samples that `oversample` started and the group did not need."""
    full: int = 0
    """Sessions that the full server refused."""
    environment_s: float = 0.0
    """Total time that the episodes of `play` waited for the environment."""
    model_s: float = 0.0
    """Total time that the episodes of `play` waited for the model."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    """Sampled tokens of finished samples, those to train on, and the others by reason."""


@dataclass(slots=True)
class OpenGroup(Generic[ItemT]):
    """An incomplete group."""

    number: int
    """The position of its item in the stream."""
    name: str
    label: str
    """The unique name of the group in the store."""
    item: ItemT
    size: int
    planned: int
    """The number of samples including those of `oversample`."""
    samples: list[EpisodeSample] = field(default_factory=list)
    failed: list[EpisodeSample] = field(default_factory=list)
    running: set[asyncio.Task[EpisodeSample]] = field(default_factory=set)
    is_done: bool = False

    def has_enough(self) -> bool:
        """Return whether the group has enough rewards, or all planned samples have ended."""
        rewards = sum(sample.reward is not None for sample in self.samples)
        return rewards >= self.size or len(self.samples) >= self.planned

    def chosen(self) -> list[EpisodeSample]:
        """Return the samples of the complete group in their order, preferring samples with a reward."""
        ranked = sorted(self.samples, key=lambda sample: sample.reward is None)[: self.size]
        return sorted(ranked, key=lambda sample: int(sample.outcome.metadata["sample"]))

    def labels(self, index: int, attempt: int) -> dict[str, Any]:
        """Return the labels of a sample in the store."""
        return {"group": self.label, "sample": index, "attempt": attempt}


class GroupStream(ABC, Generic[ItemT]):
    """A stream of complete groups: `async for group in stream`. It works while it is entered (`async with`).

    Args:
        items: The starts of the groups, read when they are needed.
        options: How samples become groups.
        proxy: The capture proxy of the model calls; None if another process runs it.
    """

    def __init__(self, items: Iterable[ItemT], options: StreamOptions, proxy: CaptureServer | None) -> None:
        self.options = options
        self.counts = StreamCounts()
        self.policy_version: int | None = None
        """The version that is being trained; set it after each update. By default the newest version in the samples."""
        self.settled: set[int] = set()
        """The workers that have a session, or everything else they need."""
        self.is_free = asyncio.Event()
        """Set while model calls are allowed."""
        self.is_free.set()
        self._proxy = proxy
        self._source = items
        self._items: Iterator[ItemT] = iter(items)
        self._stream_id = secrets.token_hex(3)
        self._names: Counter[str] = Counter()
        self._taking = asyncio.Lock()
        self._current: tuple[OpenGroup[ItemT], Iterator[int]] | None = None
        self._returned: deque[tuple[OpenGroup[ItemT], int]] = deque()
        self._groups: list[OpenGroup[ItemT]] = []
        self._workers: list[asyncio.Task[None]] = []
        # At most as many complete groups wait as are being made. More would only become stale.
        size = max(1, options.concurrency // options.samples)
        self._done: asyncio.Queue[SampleGroup | BaseException | None] = asyncio.Queue(maxsize=size)
        self._failing: list[str] = []  # the groups of the latest samples that failed in a row
        self._last_failure: str | None = None
        self._has_reward = False
        self.rewards = RewardHistory()
        self._unproven: list[SampleGroup] = []  # complete groups from before the first reward
        self._newest: int | None = None
        self._full_since: float | None = None
        self._pause = Backoff(
            first_pause_s=0.5, longest_pause_s=10.0
        )  # a server that was killed needs time to start again

    # ---- for subclasses ----

    @abstractmethod
    async def sample(self, worker: int, group: OpenGroup[ItemT], index: int, attempt: int) -> EpisodeSample:
        """Make a sample. An infrastructure failure is a status of its outcome (`INFRASTRUCTURE`), not an exception.

        Raises:
            SessionCapacityError: the server has no free session; another worker makes the sample.
        """

    @abstractmethod
    def name_of(self, item: ItemT, number: int) -> str:
        """Return the name of a group."""

    @abstractmethod
    def whole(self, group: OpenGroup[ItemT]) -> SampleGroup:
        """Convert a complete group."""

    async def release(self, worker: int) -> None:
        """Free the session of a worker, because the worker ends or the session failed."""
        self.settled.discard(worker)

    async def finish_group(self, group: OpenGroup[ItemT]) -> None:
        """Free the shared resources of a group."""

    # ---- for trainers ----

    async def __aenter__(self) -> GroupStream[ItemT]:
        makers = [asyncio.create_task(self._work(number)) for number in range(self.options.concurrency)]
        self._workers = [*makers, asyncio.create_task(self._watch(makers))]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for group in self._groups:
            await self.finish_group(group)

    def pause(self) -> None:
        """Start no model call until `resume`; running calls finish."""
        self.is_free.clear()
        self._known_proxy().hold()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._known_proxy().resume()
        self.is_free.set()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Start no model call while the block updates the weights. The block starts after running calls have ended."""
        self.pause()
        try:
            await asyncio.to_thread(self._known_proxy().pause)
            yield
        finally:
            self.resume()

    def _known_proxy(self) -> CaptureServer:
        if self._proxy is None:
            raise RolloutError("Model calls cannot be paused here: another process runs their capture proxy")
        return self._proxy

    async def take(self, count: int) -> list[SampleGroup]:
        """Return the next `count` groups, fewer if the stream ends. Dropped groups do not count."""
        groups: list[SampleGroup] = []
        while len(groups) < count and (group := await anext(self, None)) is not None:
            groups.append(group)
        return groups

    def __aiter__(self) -> GroupStream[ItemT]:
        return self

    async def __anext__(self) -> SampleGroup:
        while True:
            group = await self._done.get()
            if group is None or isinstance(group, BaseException):
                self._done.put_nowait(group)  # for the next call: the stream has ended
                raise StopAsyncIteration if group is None else group
            if all(reward is None for reward in group.rewards):
                self.counts.failed_groups += 1
                if self.options.on_failed is not None:
                    self.options.on_failed(group)
            elif self._is_stale(group):
                self.counts.stale_groups += 1
            elif self.options.keep is not None and not self.options.keep(group):
                self.counts.filtered_groups += 1
            else:
                return group

    def _is_stale(self, group: SampleGroup) -> bool:
        """Return whether a group is too old.

        Raises:
            RolloutError: the endpoint does not number its versions.
        """
        if self.options.max_staleness is None:
            return False
        versions = [one for sample in group.samples for item in sample.trainable for one in item.policy_versions]
        try:
            numbers = [int(str(version)) for version in versions]
        except ValueError:
            raise RolloutError(
                f"max_staleness needs a number as the policy's version with each answer, not {set(versions)}: by the "
                "header x-policy-version, SGLang's weight_version, or Model(policy_url=...)"
            ) from None
        if not numbers:
            return False
        self._newest = max(*numbers, self._newest or 0)
        current = self._newest if self.policy_version is None else self.policy_version
        return min(numbers) < current - self.options.max_staleness

    # ---- workers ----

    async def _watch(self, workers: list[asyncio.Task[None]]) -> None:
        """Put the first error of a worker, or the end of the stream, into the queue."""
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            for worker in workers:
                worker.cancel()
            await self._done.put(exc)
            return
        end: BaseException | None = None
        if self._last_failure is not None and not self._has_reward:
            end = RolloutError(f"No sample has a reward: {self._last_failure}")
        elif self._unproven or (self.counts.episodes and not self._has_reward):
            end = self.rewards.error()
        await self._done.put(end)

    async def _work(self, worker: int) -> None:
        """Make one sample after another."""
        try:
            while (place := await self._next_place()) is not None:
                try:
                    await self._fill(worker, *place)
                except SessionCapacityError as exc:
                    self._returned.append(place)
                    await self._wait_for_room(exc)
        finally:
            await self.release(worker)

    async def _next_place(self) -> tuple[OpenGroup[ItemT], int] | None:
        """Return the next sample to make, as its group and its number; None at the end of the items."""
        async with self._taking:  # reading an item may take time, and must open only one group
            while True:
                while self._returned:
                    place = self._returned.popleft()
                    if not place[0].is_done:
                        return place
                if self._current is not None:
                    group, numbers = self._current
                    index = None if group.is_done else next(numbers, None)
                    if index is not None:
                        return group, index
                # In a thread, because a list of tasks may be read from a server, page by page.
                item: Any = await asyncio.to_thread(next, self._items, _END)
                if item is _END:
                    return None
                opened = self._open(item)
                self._groups.append(opened)
                self._current = opened, iter(range(opened.planned))

    def _open(self, item: ItemT) -> OpenGroup[ItemT]:
        number = sum(self._names.values())
        name = self.name_of(item, number)
        self._names[name] += 1
        if self._names[name] > 1:  # for example in a second epoch
            name = f"{name}.{self._names[name]}"
        planned = self.options.samples + self.options.oversample
        return OpenGroup(number, name, f"{name}-{self._stream_id}", item, self.options.samples, planned)

    async def _wait_for_room(self, refusal: SessionCapacityError) -> None:
        """Wait before the next attempt, because the server is full. Workers with a session continue.

        Raises:
            RolloutError: no worker has had a session for `_NO_ROOM_S`.
        """
        self.counts.full += 1
        now = time.monotonic()
        if self._full_since is None:
            self._full_since = now
            logger.warning("the server is full, so fewer episodes are played at once: %s", refusal)
        if self.settled:
            self._full_since = now
        elif now - self._full_since > _NO_ROOM_S:
            raise RolloutError(f"The server has had no room for {_NO_ROOM_S:g} s: {message_of(refusal)}")
        await asyncio.sleep(min(refusal.retry_after_s or 0.5, 2.0))

    async def _fill(self, worker: int, group: OpenGroup[ItemT], index: int) -> None:
        """Make one sample of a group; repeat it after an infrastructure failure."""
        for attempt in range(self.options.retries + 1):
            sample = await self._attempt(worker, group, index, attempt)
            if sample is None:
                return
            has_failed = sample.outcome.status in INFRASTRUCTURE
            if has_failed:
                await self.release(worker)
                self.counts.failed += 1
            if not has_failed or attempt == self.options.retries:
                self._judge(group, sample)
                await self._add(group, sample)
                return
            group.failed.append(sample)
            await asyncio.sleep(self._pause.pause_s(attempt))

    async def _attempt(self, worker: int, group: OpenGroup[ItemT], index: int, attempt: int) -> EpisodeSample | None:
        """Make a sample; None if the group became complete without it."""
        making = asyncio.create_task(self.sample(worker, group, index, attempt))
        group.running.add(making)
        try:
            await asyncio.wait({making})
        finally:
            group.running.discard(making)
            if not making.done():  # the stream ends
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
        if making.cancelled():
            self.counts.surplus += 1
            await self.release(worker)
            return None
        return making.result()

    def _judge(self, group: OpenGroup[ItemT], sample: EpisodeSample) -> None:
        """Count samples that fail in a row.

        Raises:
            RolloutError: so many failed that the others would fail too.
        """
        if sample.outcome.status not in INFRASTRUCTURE:
            self._failing.clear()
            return
        self._failing.append(group.name)
        self._last_failure = sample.outcome.reason or sample.outcome.status
        enough = max(_HOPELESS, self.options.concurrency)
        if len(self._failing) >= enough and len(set(self._failing)) >= _HOPELESS_GROUPS:
            raise RolloutError(
                f"{len(self._failing)} samples in a row failed {self.options.retries + 1} times each; the last one: "
                f"{sample.outcome.reason}"
            )

    async def _add(self, group: OpenGroup[ItemT], sample: EpisodeSample) -> None:
        if group.is_done:  # it ended just before its cancellation
            self.counts.surplus += 1
            return
        self.counts.episodes += 1
        self.counts.tokens.add(sample.tokens())
        self._has_reward |= sample.reward is not None
        if sample.reward is not None and sample.is_rewarded:
            self.rewards.gives_rewards = True
        elif sample.outcome.status not in INFRASTRUCTURE:
            self.rewards.end_episodes()
        group.samples.append(sample)
        if not group.has_enough():
            return
        group.is_done = True
        if surplus := set(group.running):
            for making in surplus:
                making.cancel()
            await asyncio.wait(surplus)
        self._groups.remove(group)
        await self.finish_group(group)
        if isinstance(self._source, Curriculum):
            self._source.update(group.number, [each.reward for each in group.samples])
        whole = self.whole(group)
        if not self.rewards.gives_rewards and any(reward is not None for reward in whole.rewards):
            self._unproven.append(whole)
            return
        ready, self._unproven = [*self._unproven, whole], []
        for each in ready:
            await self._done.put(each)


def model_to_train(model: Model) -> Model:
    """Return a model for training: without `sampling`, it samples from its own distribution."""
    if model.sampling:
        return model
    sampling = Sampling().parameters(model.dialect, model.engine)
    return model.model_copy(update={"sampling": sampling})


# ---- the order of items ----


def shuffled(items: Sequence[ItemT], *, seed: int = 0, epochs: int | None = None) -> Iterator[ItemT]:
    """Yield items in a new random order in each epoch; endless if `epochs` is None."""
    draw = random.Random(seed)
    epoch = 0
    while items and (epochs is None or epoch < epochs):
        order = list(range(len(items)))
        draw.shuffle(order)
        yield from (items[index] for index in order)
        epoch += 1


class Curriculum(Generic[ItemT]):
    """Draws items endlessly, and prefers items from which the policy can learn: neither solved nor hopeless.

    Let p be the mean reward of an item, scaled so that the lowest reward of all items is 0 and the highest is 1. Then
    its weight is p(1 - p), but at least `floor`, so that solved and hopeless items are tried again. Pass the curriculum
    to `rollouts` or `play`, which report the rewards of each group.

    Args:
        items: The items, such as the tasks of a split.
        seed: The seed of the draws, which also depend on the order of finished groups.
        floor: The smallest weight; the largest possible weight is 0.25.
        memory: The weight of an item's old mean when new rewards arrive, from 0 to 1.
    """

    def __init__(self, items: Sequence[ItemT], *, seed: int = 0, floor: float = 0.02, memory: float = 0.5) -> None:
        if not items:
            raise ValueError("a curriculum needs at least one item")
        if not 0 < floor <= 0.25 or not 0 <= memory < 1:
            raise ValueError("floor must be above 0 and at most 0.25, memory at least 0 and below 1")
        self._items = items
        self._draw = random.Random(seed)
        self._floor, self._memory = floor, memory
        self._means: dict[int, float] = {}
        self._range: tuple[float, float] | None = None
        self._drawn: list[int] = []
        self._lock = threading.Lock()  # a stream draws and reports in different threads

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        with self._lock:
            weights = [self._weight(index) for index in range(len(self._items))]
            (index,) = self._draw.choices(range(len(weights)), weights)
            self._drawn.append(index)
        return self._items[index]

    def update(self, number: int, rewards: Sequence[float | None]) -> None:
        """Report the rewards of a group; `number` is the position of its item in the draws, from 0."""
        scored = [reward for reward in rewards if reward is not None]
        if not scored:
            return
        with self._lock:
            index = self._drawn[number]
            mean = sum(scored) / len(scored)
            before = self._means.get(index)
            self._means[index] = mean if before is None else self._memory * before + (1 - self._memory) * mean
            low, high = self._range or (scored[0], scored[0])
            self._range = min(low, *scored), max(high, *scored)

    def mean(self, index: int) -> float | None:
        """Return the mean reward of an item, in which newer rewards count more; None before the first reward."""
        return self._means.get(index)

    def _weight(self, index: int) -> float:
        mean = self._means.get(index)
        if mean is None or self._range is None or self._range[0] == self._range[1]:
            return 0.25  # nothing is known about the item: use the largest weight
        low, high = self._range
        share = (mean - low) / (high - low)
        return max(self._floor, share * (1 - share))
