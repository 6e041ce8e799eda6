"""A manifest of the behaviours of `VectorEnv`, each with one test, which runs over every protocol and codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from behaviours import Manifest
from openenv import VectorEnv
from openenv.errors import ClientModeError, RequestTimeout
from servers import RunningServer

MANIFEST = {
    "slots.apart": "every slot has a session and an environment of its own, freed at the end",
    "autoreset.next_step": "an ended episode starts over with the next step, as it was asked for",
    "autoreset.same_step": "an ended episode starts over in the same step, and its end is kept",
    "autoreset.disabled": "nothing begins by itself if that is disabled",
    "step.parts": "the first slots that are ready do not wait for the others",
    "step.timeout": "a timeout loses nothing",
}
behaviour = Manifest(MANIFEST)


@dataclass(frozen=True)
class Transport:
    """A server and the options with which vectors reach it."""

    server: RunningServer
    options: dict[str, Any]

    def vector(self, n: int, **options: Any) -> VectorEnv[Any, Any]:
        """Return a vector of n environments."""
        return VectorEnv(self.server.url, n, **self.options, **options)


@pytest.fixture(params=["v1", "json", "msgpack"])
def transport(request: pytest.FixtureRequest) -> Transport:
    """A server of protocol v1 alone, or of v2 with each codec."""
    if request.param == "v1":
        return Transport(request.getfixturevalue("old"), {})
    return Transport(request.getfixturevalue("adder"), {"connections": 2, "codec": request.param})


def adds(*numbers: int) -> list[dict[str, Any]]:
    return [{"add": number} for number in numbers]


def seen(result: Any, *fields: str) -> list[Any]:
    """The values of some fields in each observation."""
    return [tuple(one[field] for field in fields) if len(fields) > 1 else one[fields[0]] for one in result.observations]


def test_every_behaviour_of_the_manifest_has_its_test() -> None:
    behaviour.check()


@behaviour("slots.apart")
def test_every_slot_has_a_session_of_its_own(transport: Transport) -> None:
    manager = transport.server.manager
    with transport.vector(10) as env:
        first = env.reset(seed=100)
        assert seen(first, "seed") == list(range(100, 110))
        assert len(set(seen(first, "env"))) == manager.active == 10
        assert first.rewards.tolist() == [0.0] * 10
        for turn in range(1, 4):
            result = env.step(adds(*range(10)))
            assert seen(result, "total") == [turn * add for add in range(10)]
        assert result.rewards.tolist() == [float(add) for add in range(10)]
        assert not result.dones.any()
        assert result.ok.all()
        assert result.slots == list(range(10))
        assert [state["step_count"] for state in env.states()] == [3] * 10
    transport.server.wait_for(lambda: manager.active == 0)


@behaviour("autoreset.next_step")
def test_an_ended_episode_starts_over_with_the_next_step(transport: Transport) -> None:
    with transport.vector(2) as env:
        env.reset(seed=1, word="again")
        over = env.step([{"add": 3, "end": True}, {"add": 4}])
        assert over.dones.tolist() == over.terminated.tolist() == [True, False]
        begun = env.step(adds(9, 9))
        assert begun.rewards.tolist() == [0.0, 9.0]
        assert begun.dones.tolist() == [False, False]
        assert [one.started for one in begun.by_slot] == [True, False]
        assert seen(begun, "total", "steps", "seed", "word")[0] == (0, 0, None, "again")
        assert env.step(adds(5, 5)).rewards.tolist() == [5.0, 5.0]


@behaviour("autoreset.same_step")
def test_an_ended_episode_starts_over_in_the_same_step(transport: Transport) -> None:
    with transport.vector(3, autoreset="same_step") as env:
        env.reset()
        result = env.step([{"add": 3, "end": True}, {"add": 4}, {"add": 5, "limit": True}])
        assert result.rewards.tolist() == [3.0, 4.0, 5.0]
        assert result.terminated.tolist() == [True, False, False]
        assert result.truncated.tolist() == [False, False, True]
        assert seen(result, "steps") == [0, 1, 0]
        assert [None if one is None else one.observation["total"] for one in result.finals] == [3, None, 5]
        assert env.step(adds(1, 1, 1)).rewards.tolist() == [1.0, 1.0, 1.0]


@behaviour("autoreset.disabled")
def test_nothing_begins_by_itself_if_that_is_disabled(transport: Transport) -> None:
    with transport.vector(2, autoreset="disabled") as env:
        env.reset()
        env.step([{"add": 3, "end": True}, {"add": 1}])
        assert seen(env.step(adds(4, 4)), "total", "steps") == [(7, 2), (5, 2)]


def take_slots(take: Callable[[int], Any], count: int) -> dict[int, float]:
    """Take the results of so many slots, in as many parts as they come; return their rewards."""
    rewards: dict[int, float] = {}
    while len(rewards) < count:
        result = take(count - len(rewards))
        assert len(result) >= 1
        rewards |= dict(zip(result.slots, result.rewards.tolist(), strict=True))
    return rewards


@behaviour("step.parts")
def test_the_first_that_are_ready_do_not_wait_for_the_others(transport: Transport, adder_cls: Any) -> None:
    with transport.vector(6) as env:
        env.reset()
        moves = [{"add": slot, "wait": "slow" if slot in (1, 4) else ""} for slot in range(6)]
        env.step_async(moves, each=True)
        assert take_slots(lambda _: env.step_wait(k=1), 4) == {0: 0.0, 2: 2.0, 3: 3.0, 5: 5.0}
        with pytest.raises(RequestTimeout, match="2 slots"):
            env.step_wait(0.05)
        env.step_async({0: {"add": 10}, 5: {"add": 15}})
        assert take_slots(lambda missing: env.step_wait(k=missing), 2) == {0: 10.0, 5: 15.0}
        adder_cls.gates["slow"].set()
        assert take_slots(lambda _: env.step_wait(), 2) == {1: 1.0, 4: 4.0}
        assert adder_cls.ran["step"] == 8


@behaviour("step.timeout")
def test_a_timeout_loses_nothing(transport: Transport, adder_cls: Any) -> None:
    with transport.vector(2) as env:
        env.reset()
        with pytest.raises(RequestTimeout, match="slots have not answered"):
            env.step([{"add": 1, "wait": "gate"}, {"add": 2}], timeout_s=0.1)
        with pytest.raises(ClientModeError, match="step_wait first"):
            env.step(adds(1, 1))
        adder_cls.gates["gate"].set()
        assert env.step_wait().rewards.tolist() == [1.0, 2.0]
