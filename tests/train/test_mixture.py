"""Several streams as one: shares by weight, pauses, versions and resumption of all of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import Outcome
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Task
from openenv.train import EpisodeSample, Mixture, SampleGroup
from openenv.train.stream import GroupStream, OpenGroup, StreamOptions


class Gate:
    """The part of a capture proxy that a stream uses."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def hold(self) -> None:
        self.orders.append("hold")

    def pause(self) -> None:
        self.orders.append("pause")

    def resume(self) -> None:
        self.orders.append("resume")


class Numbers(GroupStream[int]):
    """Makes samples of numbers; each takes some turns of the loop."""

    def __init__(
        self, items: Any, options: StreamOptions, *, turns: int = 0, store: RolloutStore | None = None
    ) -> None:
        self.gate = Gate()
        super().__init__(items, options, self.gate, store)  # type: ignore[arg-type]
        self._turns = turns
        self._kept = store

    def name_of(self, item: int, number: int) -> str:
        return f"item-{item}"

    def whole(self, group: OpenGroup[int]) -> SampleGroup:
        return SampleGroup(group.name, {"item": group.item}, group.chosen(), group.failed)

    async def sample(self, worker: int, group: OpenGroup[int], index: int, attempt: int) -> EpisodeSample:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        labels = group.labels(index, attempt)
        outcome = Outcome(rollout_id=f"{group.label}-{index}", status="ok", reward=1.0, metadata=labels)
        if self._kept is not None:
            self._kept.add(outcome, Task(instruction="count"))
        return EpisodeSample(outcome)


def options(**more: Any) -> StreamOptions:
    return StreamOptions(**{"samples": 2, "concurrency": 4, **more})


@asynccontextmanager
async def mixed(weights: dict[str, float] | None = None, **streams: Numbers) -> AsyncIterator[Mixture]:
    mixture = Mixture(streams, weights)
    for stream in streams.values():
        await stream.__aenter__()
    try:
        yield mixture
    finally:
        for stream in streams.values():
            await stream.__aexit__()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize("turns", [0, 200])
@pytest.mark.parametrize(("weights", "shares"), [((3, 1), (12, 4)), ((0.5, 1.5), (4, 12)), ((1, 1), (8, 8))])
def test_shares_are_those_of_the_weights_at_any_speed(weights: Any, shares: Any, turns: int) -> None:
    async def train() -> None:
        fast, slow = Numbers(itertools.count(), options()), Numbers(itertools.count(), options(), turns=turns)
        async with mixed(dict(zip(("fast", "slow"), weights, strict=True)), fast=fast, slow=slow) as mixture:
            for _ in range(5):
                sources = Counter(group.source for group in await mixture.take(16))
                assert (sources["fast"], sources["slow"]) == shares
            assert {name: count / 5 for name, count in mixture.taken.items()} == dict(
                zip(("fast", "slow"), shares, strict=True)
            )

    run(train())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_streams_with_a_pace_follow_the_updates_of_the_mixture(staleness: int) -> None:
    async def train() -> None:
        many = Numbers(itertools.count(), options(groups_per_update=6, max_staleness=staleness))
        few = Numbers(itertools.count(), options(groups_per_update=2, max_staleness=staleness), turns=20)
        async with mixed(many=many, few=few) as mixture:
            for version in range(1, 8):
                sources = Counter(group.source for group in await mixture.take(8))
                assert sources == {"many": 6, "few": 2}
                mixture.policy_version = version
                assert (many.policy_version, few.policy_version, mixture.policy_version) == (version,) * 3
            for stream in (many, few):
                assert max(stream.counts.staleness) <= staleness

    run(train())


def test_the_mixture_ends_with_its_first_stream() -> None:
    async def train() -> None:
        async with mixed(short=Numbers(range(3), options()), long=Numbers(itertools.count(), options())) as mixture:
            groups = [group async for group in mixture]
        assert [group.source for group in groups] == ["short", "long"] * 3

    run(train())


def test_a_pause_holds_the_calls_of_all_streams_first() -> None:
    async def train() -> None:
        one, two = Numbers(itertools.count(), options()), Numbers(itertools.count(), options())
        async with mixed(one=one, two=two) as mixture:
            async with mixture.paused():
                assert one.gate.orders == two.gate.orders == ["hold", "pause"]
                assert not one.is_free.is_set()
            assert one.gate.orders == two.gate.orders == ["hold", "pause", "resume"]
            assert len(await mixture.take(4)) == 4

    run(train())


def test_a_mixture_continues_from_its_state(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    async def train(count: int, state: str | None) -> str:
        with RolloutStore(tmp_path / "a") as first, RolloutStore(tmp_path / "b") as second:
            a, b = Numbers(range(50), options(), store=first), Numbers(range(50), options(), store=second)
            async with mixed({"a": 2, "b": 1}, a=a, b=b) as mixture:
                if state is not None:
                    mixture.load_state_dict(json.loads(state))
                seen.extend((group.source, group.name) for group in await mixture.take(count))
                return json.dumps(mixture.state_dict())

    state = None
    for count in (4, 1, 7, 6):
        state = run(train(count, state))
    assert len(set(seen)) == len(seen) == 18
    assert Counter(source for source, _ in seen) == {"a": 12, "b": 6}
    assert {name for source, name in seen if source == "b"} == {f"item-{number}" for number in range(6)}


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_a_mixture_that_is_killed_in_any_place_trains_each_group_once(max_staleness: int) -> None:
    async def train(draw: random.Random, trained: list[tuple[str, str]], saved: dict[str, Any] | None) -> Any:
        """Train until a kill; return the last checkpoint, or None at the end."""
        paces = {"a": 2, "b": 1}
        streams = {
            name: Numbers(
                range(20 * pace),
                options(groups_per_update=pace, max_staleness=max_staleness),
                turns=draw.choice([0, 1, 30]),
            )
            for name, pace in paces.items()
        }
        async with mixed(**streams) as mixture:
            if saved is not None:
                mixture.load_state_dict(json.loads(saved["mixture"]))
            while draw.random() < 0.9:
                groups = await mixture.take(3)
                if not groups:
                    return None
                trained += [(group.source, group.name) for group in groups]
                mixture.policy_version += 1
                if draw.random() < 0.5:
                    saved = {"mixture": json.dumps(mixture.state_dict()), "trained": list(trained)}
        return saved or {}

    for seed in range(15):
        draw, trained, saved = random.Random(seed), list[tuple[str, str]](), None
        while (state := run(train(draw, trained, saved))) is not None:
            saved = state or None
            trained = [] if saved is None else list(saved["trained"])
        for name, count in (("a", 40), ("b", 20)):
            assert [item for source, item in trained if source == name] == [f"item-{n}" for n in range(count)]


def test_wrong_weights_and_states_are_refused() -> None:
    one, two = Numbers(range(3), options()), Numbers(range(3), options())
    paced = [Numbers(range(3), options(groups_per_update=count, max_staleness=0)) for count in (3, 1)]
    with pytest.raises(ValueError, match="at least one stream"):
        Mixture({})
    with pytest.raises(ValueError, match="the weights are for one, the streams are one, two"):
        Mixture({"one": one, "two": two}, {"one": 1})
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0 and finite"):
            Mixture({"one": one, "two": two}, {"one": 1, "two": weight})
    with pytest.raises(ValueError, match="ratio of groups_per_update"):
        Mixture({"one": paced[0], "two": paced[1]}, {"one": 1, "two": 1})
    mixture = Mixture({"one": one})
    with pytest.raises(ValueError, match="format"):
        mixture.load_state_dict({"format": 0})
    with pytest.raises(ValueError, match="not one"):
        mixture.load_state_dict({**mixture.state_dict(), "streams": {"other": {}}})
