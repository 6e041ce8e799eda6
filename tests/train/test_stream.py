"""How far a stream runs ahead, in which order its groups come, and how it continues after a restart."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from openenv.errors import NoRewards, RolloutError
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Task
from openenv.train import Curriculum, EpisodeSample, SampleGroup, shuffled
from openenv.train.items import ItemSource, NumberSet
from openenv.train.stream import GroupStream, OpenGroup, StreamOptions
from waiting import wait_until_async

T = TypeVar("T")


class Drawn(GroupStream[str]):
    """Makes samples without a server. An item names its behaviour: `slow...` takes five times as long as others,
    `late...` ends after another group was delivered, `hang...` never ends, `fail...` fails, `none...`
    gets no reward."""

    def __init__(self, items: Iterable[str], store: RolloutStore | None = None, **options: Any) -> None:
        super().__init__(items, StreamOptions(**{"samples": 2, "concurrency": 4, **options}), None, store)
        self.rewards.gives_rewards = True
        self.begun: list[str] = []
        self.has_delivered = asyncio.Event()
        self.most_open = 0

    def name_of(self, item: str, number: int) -> str:
        return item

    def whole(self, group: OpenGroup[str]) -> SampleGroup:
        return SampleGroup(group.name, {}, group.chosen(), group.failed)

    async def sample(self, worker: int, group: OpenGroup[str], index: int, attempt: int) -> EpisodeSample:
        self.begun.append(f"{group.name}/{index}")
        self.most_open = max(self.most_open, self._opened - len(self._delivered))
        if group.item.startswith("hang"):
            await asyncio.Event().wait()
        if group.item.startswith("late"):
            await self.has_delivered.wait()
        for _ in range(5 if group.item.startswith("slow") else 1):
            await asyncio.sleep(0)
        status: Any = "env_failed" if group.item.startswith("fail") else "ok"
        outcome = Outcome(
            rollout_id=f"{group.label}-{index}",
            status=status,
            reward=None if status == "env_failed" else float(index),
            metadata=group.labels(index, attempt),
        )
        if self._store is not None:
            await asyncio.to_thread(self._store.add, outcome, Task(instruction=group.item))
        return EpisodeSample(outcome, is_rewarded=not group.item.startswith("none"))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def names_of(stream: Drawn) -> list[str]:
    names = []
    async with stream:
        async for group in stream:
            names.append(group.name)
            stream.has_delivered.set()
    return names


# -- pace and order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_slow_tasks_keep_their_share_and_no_group_is_older_than_allowed(max_staleness: int) -> None:
    async def train() -> tuple[list[str], Drawn]:
        items = [f"{'slow' if number % 2 else 'fast'}-{number}" for number in range(120)]
        stream = Drawn(items, concurrency=12, groups_per_update=4, max_staleness=max_staleness)
        trained: list[str] = []
        async with stream:
            for update in range(1, 31):
                trained += [group.name for group in await stream.take(4)]
                stream.policy_version = update
        return trained, stream

    trained, stream = run(train())
    assert len(trained) == 120, "no finished group is dropped"
    # In any 20 groups, because the order is that of the starts.
    for first in range(0, 120, 20):
        assert sum(name.startswith("slow") for name in trained[first : first + 20]) == 10
    assert max(stream.counts.staleness) <= max_staleness
    assert stream.most_open <= 4 * (max_staleness + 1)


def test_without_a_limit_of_staleness_groups_come_as_they_end() -> None:
    assert run(names_of(Drawn(["late", "first"], samples=1))) == ["first", "late"]


def test_on_request_groups_come_in_the_order_of_their_starts() -> None:
    assert run(names_of(Drawn(["slow", "a", "b"], samples=1, in_order=True))) == ["slow", "a", "b"]


@pytest.mark.parametrize(("options", "most"), [({}, 4), ({"max_ahead": 3}, 3), ({"concurrency": 6}, 6)])
def test_a_stream_starts_a_limited_number_of_groups_before_the_trainer_takes_one(
    options: dict[str, Any], most: int
) -> None:
    async def ahead() -> tuple[int, int]:
        async with Drawn((f"fast-{number}" for number in range(1000)), **options) as stream:
            await stream.take(1)
            await wait_until_async(lambda: stream._opened - len(stream._delivered) == most)
            for _ in range(100):
                await asyncio.sleep(0)
            started = stream._opened
            await stream.take(20)
            return started, stream.most_open

    assert run(ahead()) == (most + 1, most)


def test_a_trainer_that_forgets_to_report_its_update_reads_it_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.train.stream._LONG_WAIT_S", 0.05)

    async def train() -> list[str]:
        async with Drawn(["a", "b"], groups_per_update=1, max_staleness=0) as stream:
            first = await stream.take(1)
            waiting = asyncio.create_task(stream.take(1))
            await wait_until_async(lambda: "Set stream.policy_version" in caplog.text)
            stream.policy_version = 1
            return [group.name for group in first + await waiting]

    with caplog.at_level(logging.WARNING):
        assert run(train()) == ["a", "b"]


def test_a_trainer_counts_its_updates_with_the_version_from_the_start() -> None:
    async def train() -> tuple[list[str], int]:
        async with Drawn(["a", "b"], groups_per_update=1, max_staleness=0) as stream:
            old = {**stream.state_dict(), "policy_version": None}  # as older versions saved it
            stream.load_state_dict(old)
            names = []
            for _ in range(2):
                names += [group.name for group in await stream.take(1)]
                stream.policy_version += 1
            return names, stream.policy_version

    assert run(train()) == (["a", "b"], 2)


def test_the_version_can_be_set_by_the_thread_that_trains() -> None:
    async def train() -> list[str]:
        async with Drawn(["a", "b"], groups_per_update=1, max_staleness=0) as stream:
            first = await stream.take(1)
            waiting = asyncio.create_task(stream.take(1))
            await asyncio.to_thread(setattr, stream, "policy_version", 1)
            return [group.name for group in first + await waiting]

    assert run(train()) == ["a", "b"]


def test_dropped_groups_do_not_count_towards_an_update() -> None:
    async def train() -> tuple[list[str], int]:
        stream = Drawn(
            ["fail-1", "a", "b", "fail-2", "c", "d"], groups_per_update=2, max_staleness=0, retries=0, samples=1
        )
        names = []
        async with stream:
            for update in (1, 2):
                names += [group.name for group in await stream.take(2)]
                stream.policy_version = update
        return names, stream.counts.failed_groups

    assert run(train()) == (["a", "b", "c", "d"], 2)


def test_a_paced_stream_without_any_reward_fails_instead_of_waiting() -> None:
    async def train() -> None:
        async with Drawn(["none-1", "none-2"], groups_per_update=1, max_staleness=0) as stream:
            stream.rewards.gives_rewards = False
            await stream.take(1)

    with pytest.raises(NoRewards, match="No reward in 2 episodes"):
        run(train())


def test_a_sample_that_hangs_holds_its_group_up_to_the_deadline() -> None:
    async def train() -> tuple[list[tuple[str, list[float | None]]], int]:
        items = ["hang-1", "a"]
        stream = Drawn(items, in_order=True, deadline_s=0.05, on_failed=lambda group: failed.append(group.name))
        async with stream:
            groups = [(group.name, group.rewards) async for group in stream]
        return groups, stream.counts.late

    failed: list[str] = []
    assert run(train()) == ([("a", [0.0, 1.0])], 2)
    assert failed == ["hang-1"]


def test_if_every_sample_hangs_the_stream_fails() -> None:
    with pytest.raises(RolloutError, match="deadline_s"):
        run(names_of(Drawn((f"hang-{number}" for number in range(99)), deadline_s=0.01, samples=1)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_staleness": 1}, "needs groups_per_update"),
        ({"groups_per_update": 0}, "at least 1"),
        ({"max_ahead": 0}, "at least 1"),
        ({"deadline_s": 0}, "above 0"),
        ({"resume": True}, "pass store="),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Drawn([], **options)


# -- resumption -------------------------------------------------------------------------------------------------------


def items() -> list[str]:
    return [f"{'slow' if number % 3 == 0 else 'fast'}-{number % 7}" for number in range(30)]


def test_a_resumed_stream_yields_each_group_once_and_makes_no_sample_twice(tmp_path: Path) -> None:
    async def first() -> tuple[dict[str, Any], list[str], list[str]]:
        with RolloutStore(tmp_path) as store:
            async with Drawn(items(), store) as stream:
                taken = [group.name for group in await stream.take(7)]
                state = json.loads(json.dumps(stream.state_dict()))
                lost = [group.name for group in await stream.take(5)]  # trained after the checkpoint: they come again
                return state, taken, [*lost, *stream.begun]

    async def second() -> tuple[list[str], Drawn]:
        with RolloutStore(tmp_path) as store:
            stream = Drawn(items(), store)
            stream.load_state_dict(state)
            return await names_of(stream), stream

    state, taken, begun = run(first())
    names, stream = run(second())
    assert sorted(taken + names) == sorted(run(names_of(Drawn(items()))))
    assert stream.counts.restored >= 10, "the five lost groups were finished"
    finished = {f"{row}" for row in stream.begun}
    with RolloutStore(tmp_path) as store:
        assert store.count() == 60
    assert stream.counts.restored + len(finished) == 2 * len(names)
    assert begun


class HeavyTailed(Drawn):
    """A few samples take a hundred times as long as most; rewards of a group depend on its item."""

    def __init__(self, items: Iterable[str], draw: random.Random, **options: Any) -> None:
        super().__init__(items, **options)
        self.draw = draw

    async def sample(self, worker: int, group: OpenGroup[str], index: int, attempt: int) -> EpisodeSample:
        for _ in range(min(300, int(self.draw.paretovariate(0.7)))):
            await asyncio.sleep(0)
        return await super().sample(worker, group, index, attempt)


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_at_any_place_of_a_kill_the_order_the_age_and_the_pace_stay(max_staleness: int) -> None:
    names = [f"task-{number}" for number in range(60)]

    def wanted(group: SampleGroup) -> bool:
        return int(group.name.partition("-")[2]) % 5 != 0

    async def train(draw: random.Random, trained: list[str], saved: dict[str, Any] | None) -> dict[str, Any] | None:
        """Train until a kill; return the last checkpoint, or None at the end."""
        options: dict[str, Any] = {"groups_per_update": 3, "max_staleness": max_staleness, "keep": wanted}
        async with HeavyTailed(names, draw, concurrency=8, **options) as stream:
            if saved is not None:
                stream.load_state_dict(saved["stream"])
            while draw.random() < 0.9:
                groups = await stream.take(3)
                if not groups:
                    return None
                trained += [group.name for group in groups]
                if draw.random() < 0.5:  # as likely before the version is set as after it
                    saved = {"stream": json.loads(json.dumps(stream.state_dict())), "trained": list(trained)}
                for _ in range(draw.randrange(50)):
                    await asyncio.sleep(0)
                assert stream.most_open <= 3 * (max_staleness + 1)
                assert max(stream.counts.staleness) <= max_staleness
                stream.policy_version += 1
            return saved or {}

    for seed in range(20):
        draw, trained, saved = random.Random(seed), list[str](), None
        while (state := run(train(draw, trained, saved))) is not None:
            saved = state or None
            trained = [] if saved is None else list(saved["trained"])
            if saved is not None:  # the update of the checkpoint's groups is part of its weights
                saved["stream"]["updates"] = saved["stream"]["policy_version"] = len(trained) // 3
        assert trained == [name for name in names if int(name.partition("-")[2]) % 5 != 0]


def test_resume_continues_the_newest_stream_of_the_store(tmp_path: Path) -> None:
    async def part(count: int, **options: Any) -> tuple[list[str], Drawn]:
        with RolloutStore(tmp_path) as store:
            async with Drawn(items(), store, **options) as stream:
                return [group.name for group in await stream.take(count)], stream

    run(part(4))
    _, last = run(part(6))
    names, resumed = run(part(30, resume=True))
    assert resumed._source.stream_id == last._source.stream_id
    assert sorted(names) == sorted(run(names_of(Drawn(items()))))
    assert resumed.counts.restored >= 12


def test_a_stream_that_runs_cannot_be_resumed(tmp_path: Path) -> None:
    async def both() -> None:
        with RolloutStore(tmp_path) as store:
            async with Drawn(items(), store) as stream:
                await stream.take(1)
                async with Drawn(items(), store, resume=True) as other:
                    with pytest.raises(RolloutError, match="Another process runs the stream"):
                        await other.take(1)

    run(both())


def test_a_state_is_loaded_before_the_first_group_and_has_a_known_format() -> None:
    async def late() -> None:
        async with Drawn(items()) as stream:
            state = stream.state_dict()
            with pytest.raises(ValueError, match="this version reads 1"):
                stream.load_state_dict({**state, "format": 99})
            with pytest.raises(ValueError, match="Curriculum"):
                stream.load_state_dict({**state, "curriculum": {}})
            await stream.take(1)
            with pytest.raises(RolloutError, match="before the first group"):
                stream.load_state_dict(state)

    run(late())


def test_a_curriculum_continues_its_draws(tmp_path: Path) -> None:
    tasks = [f"task-{number}" for number in range(10)]

    async def part(count: int, state: dict[str, Any] | None = None) -> tuple[list[str], dict[str, Any]]:
        with RolloutStore(tmp_path) as store:
            async with Drawn(Curriculum(tasks, seed=3), store, concurrency=2, in_order=True) as stream:
                if state is not None:
                    stream.load_state_dict(state)
                names = [group.name for group in await stream.take(count)]
                return names, json.loads(json.dumps(stream.state_dict()))

    taken, state = run(part(5))
    again, _ = run(part(8, state))
    repeated, _ = run(part(8, state))
    assert repeated == again, "draws after the checkpoint are repeated"
    counts: dict[str, int] = {}
    for name in [*taken, *again]:
        item = name.partition(".")[0]
        counts[item] = counts.get(item, 0) + 1
        assert name in (item, f"{item}.{counts[item]}"), "each repetition of a task has a number of its own"


def test_a_curriculum_counts_the_rewards_of_a_group_once(tmp_path: Path) -> None:
    tasks = ["a", "b", "c"]

    async def part(count: int, state: dict[str, Any] | None) -> tuple[dict[str, Any], list[int]]:
        curriculum = Curriculum(tasks, seed=3)
        reports: list[int] = []
        update = curriculum.update
        curriculum.update = lambda index, rewards: (reports.append(index), update(index, rewards))[1]  # type: ignore[method-assign]
        with RolloutStore(tmp_path) as store:
            async with Drawn(curriculum, store, concurrency=2, in_order=True) as stream:
                if state is not None:
                    stream.load_state_dict(state)
                await stream.take(count)
                await wait_until_async(lambda: len(stream._finished) >= 1)  # reported, but not taken
                return json.loads(json.dumps(stream.state_dict())), reports

    state, before = run(part(3, None))
    later, after = run(part(2, state))
    assert len(before) > 3, "a finished group is reported before the trainer takes it"
    assert before + after == later["drawn"][: len(before + after)], "and not again after a restart"


def test_several_streams_share_a_curriculum() -> None:
    curriculum = Curriculum(["a", "b", "c"], seed=1)

    async def both() -> None:
        async with Drawn(curriculum) as one, Drawn(curriculum) as other:
            for _ in range(20):
                await asyncio.gather(one.take(1), other.take(1))

    run(both())
    assert [curriculum.mean(index) for index in range(3)] == [0.5, 0.5, 0.5]


def test_a_torn_line_of_a_stream_file_is_ignored(tmp_path: Path) -> None:
    source = ItemSource(Curriculum(["a", "b", "c"], seed=5), tmp_path)
    source.open()
    drawn = [source.next() for _ in range(4)]
    source.close()
    path = tmp_path / f"{source.stream_id}.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = ItemSource(Curriculum(["a", "b", "c"], seed=5), tmp_path)
    again.continue_newest()
    again.open()
    assert [again.next() for _ in range(4)] == drawn
    again.close()


def test_numbers_below_a_limit_take_no_memory() -> None:
    numbers = NumberSet()
    for number in (0, 3, 1, 5, 2):
        numbers.add(number)
    assert (numbers.below, numbers.more, len(numbers)) == (4, {5}, 5)
    assert [number in numbers for number in (3, 4, 5)] == [True, False, True]


def test_an_order_of_epochs_continues_by_repetition() -> None:
    order = list(shuffled(range(5), seed=2, epochs=3))
    source = ItemSource(shuffled(range(5), seed=2, epochs=3), None)
    assert [source.next() for _ in range(15)] == list(enumerate(order))
    assert source.next() is None
