"""`GroupStream`, the base of `play` and `rollouts`: makes samples in parallel, and yields groups with the same start.

An infrastructure failure is never scored: its sample has no reward and counts in no baseline. If every sample fails,
the stream raises an error. A finished group is never discarded because of its age. A subclass decides how to make a
sample; `items` has the order of the groups.
"""

# From items to the trainer:
#
#   ItemSource ──> dispatcher ──> places of samples ──> workers ──> finished groups ──> `__anext__` ──> trainer
#                      ▲               ▲                  │                                 │            │
#                      │               ├─ infrastructure ─┤                                 │            ├─ no reward:
#                      │               │  failure: retry  │                                 │            │  `on_failed`
#                      │               └─ no free session:│                                 │            └─ not wanted
#                      │                  to other workers┘                                 │               by `keep`
#                      └── opens a group if a worker is idle, and `_may_open` ◀── delivered, policy_version ──┘
#
# How far the stream runs ahead of the trainer, with B = groups_per_update, S = max_staleness and v updates so far:
#
#   group          0 1 2 3 | 4 5 6 7 | 8 9 ...      B = 4: groups 4 to 7 are trained in update 1
#   v = 0, S = 0   open      -         -            group g starts when g // B <= v + S, and groups arrive in the order
#   v = 0, S = 1   open      open      -            of their starts. So each is trained at most S updates after its
#   v = 1, S = 0   trained   open      -            start, whether it is fast or slow, and none is dropped.
#
# A sample:   planned ──> running ──> ended: a reward of the policy       ──> its group
#                │           ├──> ended: infrastructure failure           ──> retried, then in the group, no reward
#                │           ├──> `deadline_s` has passed                 ──> in the group, no reward
#                │           └──> cancelled: its group has enough rewards ──> counted as surplus
#                ├──> in the store of a resumed stream                    ──> its group
#                └──> never started, because its group is complete
#
# The stream fails if the infrastructure fails for good: the last samples in a row, from several groups, all failed with
# all their retries. A single broken item (one group) does not stop it.

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypedDict, TypeVar

from openenv import settings
from openenv.client.rewards import RewardHistory
from openenv.errors import RolloutError, SessionCapacityError, message_of
from openenv.protocol.backoff import Backoff
from openenv.rollout.capture.sessions_api.engine_probe import probe_logprobs_mode
from openenv.rollout.capture.training_trace import Finding, TokenCounts
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Model, Sampling

from .groups import EpisodeSample, SampleGroup
from .items import FORMAT, ItemSource, NumberSet

if TYPE_CHECKING:
    from openenv.rollout.capture import CaptureServer
    from openenv.rollout.run.process_engine import ProcessEngine
    from openenv.rollout.run.ray_engine import RayEngine

    CallGate: TypeAlias = CaptureServer | ProcessEngine | RayEngine

logger = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")

INFRASTRUCTURE: frozenset[Status] = frozenset({"env_failed", "sandbox_failed", "grader_failed"})
"""Statuses of samples that failed because of the infrastructure, not because of the policy."""
_HOPELESS, _HOPELESS_GROUPS = 4, 3
"""The run ends if at least this many samples fail in a row, from this many groups. One group proves nothing: its item
may be broken while all others work."""
_NO_ROOM_S = 60.0
"""The run ends if the server has been full for this time and no worker has a session."""
_LONG_WAIT_S = 10.0
"""After this time of waiting for an update of `policy_version`, the log says so."""


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
    groups_per_update: int | None = None
    """The number of groups that the trainer takes between two changes of `stream.policy_version`; `max_staleness` needs
    it."""
    max_staleness: int | None = None
    """How many updates of the policy may lie between the start of a group and its training. The stream starts no group
    that would become older, and yields groups in the order of their starts."""
    max_ahead: int | None = None
    """How many groups may be started and not yet taken. By default twice as many as fill `concurrency`, or what
    `max_staleness` allows."""
    in_order: bool = False
    """Whether groups come in the order of their starts, not of their ends; always so with `max_staleness`."""
    deadline_s: float | None = None
    """The longest time of a sample. Then it is cancelled: it has no reward and counts in no baseline. The group comes
    with its other samples."""
    resume: bool = False
    """Whether to continue the newest stream in the store: finished samples are read, not made again. `load_state_dict`
    continues a certain stream from a checkpoint."""
    keep: Callable[[SampleGroup], bool] | None = None
    """Returns whether the trainer wants a group, such as `lambda group: group.spread > 0`."""
    on_failed: Callable[[SampleGroup], object] | None = None
    """Called with each group without any reward; the stream drops these groups."""

    def __post_init__(self) -> None:
        if min(self.samples, self.concurrency, 1 if self.max_ahead is None else self.max_ahead) < 1:
            raise ValueError("samples, concurrency and max_ahead must be at least 1")
        if min(self.oversample, self.retries, self.max_staleness or 0) < 0:
            raise ValueError("oversample, retries and max_staleness must be at least 0")
        if self.groups_per_update is not None and self.groups_per_update < 1:
            raise ValueError("groups_per_update must be at least 1")
        if self.max_staleness is not None and self.groups_per_update is None:
            raise ValueError("max_staleness needs groups_per_update, the number of groups that you train on per update")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ValueError("deadline_s must be above 0")

    @property
    def most_ahead(self) -> float:
        """The number of groups that may be started and not yet taken."""
        if self.max_ahead is not None:
            return self.max_ahead
        if self.max_staleness is not None:
            return math.inf  # `max_staleness` is the limit
        return 2 * math.ceil(self.concurrency / self.samples)


class StreamArguments(TypedDict, total=False):
    """The fields of `StreamOptions` as keyword arguments; mypy compares both lists."""

    samples: int
    concurrency: int
    oversample: int
    retries: int
    groups_per_update: int | None
    max_staleness: int | None
    max_ahead: int | None
    in_order: bool
    deadline_s: float | None
    resume: bool
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
    late: int = 0
    """Samples that `deadline_s` ended."""
    restored: int = 0
    """Samples that a resumed stream took from the store."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many groups came that many updates after their start."""
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
    stored: dict[int, EpisodeSample] = field(default_factory=dict)
    """The finished samples of a resumed group, by their number in the group."""
    updates: int = 0
    """The number of updates of the policy at its start."""
    policy_version: int = 0
    """The version of the policy at its start."""
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
        labels = {"group": self.label, "item": self.name, "sample": index, "attempt": attempt}
        return {**labels, "policy_version": self.policy_version}


class GroupStream(ABC, Generic[ItemT]):
    """A stream of complete groups: `async for group in stream`. It works while it is entered (`async with`), from the
    first request for a group on.

    Args:
        items: The starts of the groups, read when they are needed.
        options: How samples become groups.
        proxy: Pauses the model calls: their capture proxy, or an engine with the proxies of its workers. None if no
            calls are captured.
        store: Keeps the samples, so that a later process can resume the stream.
        model: The endpoint that samples; None if no model is trained.
    """

    def __init__(
        self,
        items: Iterable[ItemT],
        options: StreamOptions,
        proxy: CallGate | None,
        store: RolloutStore | None = None,
        model: Model | None = None,
    ) -> None:
        if options.resume and store is None:
            raise ValueError("resume needs the store of the stream that it continues: pass store=")
        self.options = options
        self.counts = StreamCounts()
        self.settled: set[int] = set()
        """The workers that have a session, or everything else they need."""
        self.is_free = asyncio.Event()
        """Set while model calls are allowed."""
        self.is_free.set()
        self._proxy = proxy
        self._store = store
        self._model = model
        self._raw_logprobs: Finding | None = None  # of each sequence, if they cannot be trained on
        self._source = ItemSource(items, None if store is None else store.root / "streams")
        if options.resume:
            self._source.continue_newest()
        self._policy_version = 0
        self._updates = 0
        self._delivered = NumberSet()
        self._dropped = 0  # delivered groups that the trainer did not get
        self._opened = 0
        self._names: Counter[str] = Counter()
        self._groups: list[OpenGroup[ItemT]] = []
        self._finished: dict[int, tuple[SampleGroup, int]] = {}  # by number: the group, and the updates at its start
        self._places: asyncio.Queue[tuple[OpenGroup[ItemT], int] | None] = asyncio.Queue()
        self._idle = 0  # workers that wait for a place
        self._running: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._end: BaseException | None = None
        self._has_ended = False
        self._changed = asyncio.Event()  # set, and replaced by a new one, when anything below may continue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failing: list[str] = []  # the groups of the latest samples that failed in a row
        self._last_failure: str | None = None
        self._has_reward = False
        self.rewards = RewardHistory()
        self._unproven: list[OpenGroup[ItemT]] = []  # complete groups from before the first reward
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

    def checked(self, item: ItemT, number: int) -> ItemT:
        """Return an item in the form that `sample` needs.

        Raises:
            RolloutError: it cannot start a group.
        """
        return item

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

    def hopeless(self, text: str) -> RolloutError:
        """Return the error that ends a stream without rewards."""
        return RolloutError(text)

    # ---- for trainers ----

    async def __aenter__(self) -> GroupStream[ItemT]:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for group in self._groups:
            await self.finish_group(group)
        self._source.close()

    @property
    def policy_version(self) -> int:
        """The version that is being trained, 0 at first. Set it after each update of the weights, from any thread."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self._policy_version:
            self._policy_version = version
            self._updates += 1
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream as JSON values, for `load_state_dict`.

        Save it with each checkpoint of the policy. Groups that the trainer has taken count as trained.
        """
        return {
            "format": FORMAT,
            **self._source.state_dict(),
            "delivered": {"below": self._delivered.below, "more": sorted(self._delivered.more)},
            "dropped": self._dropped,
            "updates": self._updates,
            "policy_version": self._policy_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, before the first group is taken. Pass the same items and the same store as before.

        Groups that were taken before the state was saved do not come again. All others come once: finished samples are
        read from the store, the others are made.

        Raises:
            RolloutError: a group was already taken.
            ValueError: the state has another format, or does not fit the items.
        """
        if self._running:
            raise RolloutError("load_state_dict must come before the first group is taken")
        if state.get("format") != FORMAT:
            raise ValueError(f"the state has the format {state.get('format')!r}; this version reads {FORMAT}")
        self._source.load_state_dict(state)
        delivered = state["delivered"]
        self._delivered = NumberSet(delivered["below"], set(delivered["more"]))
        self._opened = self._delivered.below  # the pace counts from here
        self._dropped, self._updates = state["dropped"], state["updates"]
        self._policy_version = state["policy_version"] or 0  # None in older states

    def pause(self) -> None:
        """Start no model call until `resume`; running calls finish."""
        self.is_free.clear()
        self._known_proxy().hold()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._known_proxy().resume()
        self.is_free.set()

    async def drain(self) -> None:
        """Start no model call until `resume`, like `pause`; return when running calls have ended."""
        await asyncio.to_thread(self._known_proxy().pause)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Start no model call while the block updates the weights. The block starts after running calls have ended."""
        self.pause()
        try:
            await self.drain()
            yield
        finally:
            self.resume()

    def _known_proxy(self) -> CallGate:
        if self._proxy is None:
            raise RolloutError("Model calls cannot be paused: no capture proxy sees them")
        return self._proxy

    async def start(self) -> None:
        """Start to make samples; the first request for a group does it, too."""
        async with self._starting:
            if self._running:
                return
            await asyncio.to_thread(self._source.open)
            if self._model is not None:
                self._raw_logprobs = await asyncio.to_thread(_check_logprobs, self._model)
            workers = [self._work(number) for number in range(self.options.concurrency)]
            makers = [asyncio.create_task(work) for work in (self._dispatch(), *workers)]
            self._running = [*makers, asyncio.create_task(self._watch(makers))]

    async def take(self, count: int) -> list[SampleGroup]:
        """Return the next `count` groups, fewer if the stream ends. Dropped groups do not count."""
        groups: list[SampleGroup] = []
        while len(groups) < count and (group := await anext(self, None)) is not None:
            groups.append(group)
        return groups

    def __aiter__(self) -> GroupStream[ItemT]:
        return self

    async def __anext__(self) -> SampleGroup:
        await self.start()
        while True:
            changed = self._changed  # before the checks, so that no change is missed
            number = self._next_finished()
            if number is not None:
                if (group := self._deliver(number)) is not None:
                    return group
            elif self._has_ended:
                raise StopAsyncIteration if self._end is None else self._end
            else:
                await self._wait(changed)

    def _next_finished(self) -> int | None:
        """Return the number of the next group to deliver, or None if it is not finished."""
        if not self.options.in_order and self.options.max_staleness is None:
            return next(iter(self._finished), None)  # the first that ended
        number = self._delivered.below
        return number if number in self._finished else None

    def _deliver(self, number: int) -> SampleGroup | None:
        """Count a finished group; return it if the trainer wants it."""
        group, updates = self._finished.pop(number)
        self._delivered.add(number)
        self._wake()
        if all(reward is None for reward in group.rewards):
            self.counts.failed_groups += 1
            if self.options.on_failed is not None:
                self.options.on_failed(group)
        elif self.options.keep is not None and not self.options.keep(group):
            self.counts.filtered_groups += 1
        else:
            self.counts.staleness[self._updates - updates] += 1
            return group
        self._dropped += 1
        return None

    async def _wait(self, changed: asyncio.Event) -> None:
        """Wait for a change. Say in the log if only an update of `policy_version` can bring one.

        Raises:
            NoRewards: no sample has a reward, and no more may start.
        """
        is_paced = not self._groups and not self._finished and not self._may_open()
        if is_paced and self._unproven:  # no more episodes may start, so there will be no reward
            raise self.rewards.error()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), _LONG_WAIT_S if is_paced else None)
            return
        logger.warning(
            "No group may start: %d were taken in %d updates, with groups_per_update=%s and max_staleness=%s. Set "
            "stream.policy_version to a new number after each update of the weights",
            len(self._delivered) - self._dropped,
            self._updates,
            self.options.groups_per_update,
            self.options.max_staleness,
        )
        await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- the dispatcher ----

    async def _dispatch(self) -> None:
        """Open one group after another, as workers become idle and the trainer takes groups."""
        while True:
            changed = self._changed
            if not (self._places.empty() and self._idle and self._may_open()):
                await changed.wait()
                continue
            # In a thread, because a list of tasks may be read from a server, page by page.
            group = await asyncio.to_thread(self._open)
            if group is None:
                break
            self._groups.append(group)
            for index in range(group.planned):
                self._places.put_nowait((group, index))
        await self._places.join()
        for _ in range(self.options.concurrency):
            self._places.put_nowait(None)

    def _may_open(self) -> bool:
        """Return whether another group may start."""
        # The trainer cannot take groups from before the first reward, so they do not count.
        if self._opened - len(self._delivered) - len(self._unproven) >= self.options.most_ahead:
            return False
        if self.options.max_staleness is None or self.options.groups_per_update is None:
            return True
        place = self._opened - self._dropped  # among the groups that the trainer gets
        return place // self.options.groups_per_update <= self._updates + self.options.max_staleness

    def _open(self) -> OpenGroup[ItemT] | None:
        """Return the next group that was not delivered before a restart; None at the end of the items."""
        while (numbered := self._source.next()) is not None:
            number, item = numbered[0], self.checked(numbered[1], numbered[0])
            self._opened = number + 1
            name = self.name_of(item, number)
            self._names[name] += 1
            if self._names[name] > 1:  # for example in a second epoch
                name = f"{name}.{self._names[name]}"
            if number in self._delivered:
                continue
            planned = self.options.samples + self.options.oversample
            label = f"{name}-{self._source.stream_id}"
            group = OpenGroup(number, name, label, item, self.options.samples, planned, updates=self._updates)
            group.policy_version = self._policy_version
            if self._source.is_resumed:
                group.stored = self._stored_samples(label)
            return group
        return None

    def _stored_samples(self, label: str) -> dict[int, EpisodeSample]:
        """Return the finished samples of a group in the store, by their number in the group."""
        if self._store is None:
            return {}
        samples = {}
        for row in self._store.find(group=label):
            outcome = self._store.read(row).outcome
            if outcome.status in INFRASTRUCTURE or outcome.status == "cancelled":
                continue
            facts = outcome.metadata
            turn_rewards = facts.get("turn_rewards")
            samples[int(facts["sample"])] = EpisodeSample(
                outcome,
                outcome.sequences,
                is_rewarded=bool(facts.get("is_rewarded", True)),
                turn_rewards=None if turn_rewards is None else {int(key): value for key, value in turn_rewards.items()},
            )
        return samples

    # ---- workers ----

    async def _watch(self, workers: list[asyncio.Task[None]]) -> None:
        """End the stream with its workers, or with the first error of one."""
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._end = exc
        else:
            if self._last_failure is not None and not self._has_reward:
                self._end = self.hopeless(f"No sample has a reward: {self._last_failure}")
            elif self._unproven or (self.counts.episodes and not self._has_reward):
                self._end = self.rewards.error()
        self._has_ended = True
        self._wake()

    async def _work(self, worker: int) -> None:
        """Make one sample after another."""
        try:
            while (place := await self._next_place()) is not None:
                try:
                    if not place[0].is_done:
                        await self._fill(worker, *place)
                except SessionCapacityError as exc:
                    self._places.put_nowait(place)
                    await self._wait_for_room(exc)
                finally:
                    self._places.task_done()
        finally:
            await self.release(worker)

    async def _next_place(self) -> tuple[OpenGroup[ItemT], int] | None:
        """Return the next sample to make, as its group and its number; None at the end of the items."""
        self._idle += 1
        self._wake()  # the dispatcher opens a group for an idle worker
        try:
            return await self._places.get()
        finally:
            self._idle -= 1
            if self._idle and self._places.empty():
                self._wake()  # the other idle workers need another group

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
        if index in group.stored:
            self.counts.restored += 1
            await self._add(group, group.stored.pop(index))
            return
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
        is_late = False
        try:
            await asyncio.wait({making}, timeout=self.options.deadline_s)
            is_late = not making.done()
        finally:
            group.running.discard(making)
            if not making.done():  # the sample is late, or the stream ends
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
        if is_late and making.cancelled():
            self.counts.late += 1
            await self.release(worker)
            return self._late_sample(group, index, attempt)
        if making.cancelled():
            self.counts.surplus += 1
            await self.release(worker)
            return None
        return making.result()

    def _late_sample(self, group: OpenGroup[ItemT], index: int, attempt: int) -> EpisodeSample:
        reason = f"the sample was not finished after deadline_s={self.options.deadline_s:g}"
        return EpisodeSample(
            Outcome(
                rollout_id=f"{group.label}-{index}",
                status="cancelled",
                reason=reason,
                metadata=group.labels(index, attempt),
            )
        )

    def _judge(self, group: OpenGroup[ItemT], sample: EpisodeSample) -> None:
        """Count samples that fail in a row.

        Raises:
            RolloutError: so many failed that the others would fail too.
        """
        if sample.outcome.status not in INFRASTRUCTURE and sample.outcome.status != "cancelled":
            self._failing.clear()
            return
        self._failing.append(group.name)
        self._last_failure = sample.outcome.reason or sample.outcome.status
        enough = max(_HOPELESS, self.options.concurrency)
        if len(self._failing) >= enough and len(set(self._failing)) >= _HOPELESS_GROUPS:
            raise self.hopeless(
                f"{len(self._failing)} samples in a row failed {self.options.retries + 1} times each; the last one: "
                f"{sample.outcome.reason}"
            )

    async def _add(self, group: OpenGroup[ItemT], sample: EpisodeSample) -> None:
        if group.is_done:  # it ended just before its cancellation
            self.counts.surplus += 1
            return
        self.counts.episodes += 1
        if self._raw_logprobs is not None:
            for sequence in (*sample.sequences, *(one for each in sample.players.values() for one in each.sequences)):
                sequence.validation.append(self._raw_logprobs)
        self.counts.tokens.add(sample.tokens())
        self._has_reward |= sample.reward is not None
        if sample.reward is not None and sample.is_rewarded:
            self.rewards.gives_rewards = True
        elif sample.outcome.status not in INFRASTRUCTURE:
            self.rewards.end_episodes(about=sample.outcome.reason)
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
        self._source.report(group.number, [each.reward for each in group.samples])
        ready = [group]
        if self.rewards.gives_rewards:
            ready, self._unproven = [*self._unproven, group], []
        elif any(each.reward is not None for each in group.samples):
            self._unproven.append(group)
            return
        for each in ready:
            self._finished[each.number] = self.whole(each), each.updates
        self._wake()


# A policy that samples at temperature T has the probabilities softmax(logits / T). Engines that report softmax(logits)
# give wrong importance ratios at any T but 1. At 0 nothing is sampled, so nothing can be trained on anyway.
def _check_logprobs(model: Model) -> Finding | None:
    """Ask an endpoint whether its log-probabilities are those after temperature; return a finding if they are not."""
    temperature = model.sampling.get("temperature", 1.0)
    if model.dialect != "openai_chat" or temperature in (0, 1) or settings.allow_raw_logprobs():
        return None
    key = model.api_key.get_secret_value()
    if probe_logprobs_mode(model.base_url, model.name, api_key=key) != "raw":
        return None
    text = (
        f"the log-probabilities are those before temperature={temperature:g}, so importance ratios would be wrong: "
        "start vLLM with --logprobs-mode processed_logprobs and SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or "
        "sample at temperature 1"
    )
    logger.warning("%s: %s", model.base_url, text)
    return Finding("FATAL", "raw_logprobs", text)


def model_to_train(model: Model) -> Model:
    """Return a model for training: without `sampling`, it samples from its own distribution."""
    if model.sampling:
        return model
    sampling = Sampling().parameters(model.dialect, model.engine)
    return model.model_copy(update={"sampling": sampling})
