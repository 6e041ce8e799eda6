"""`VectorEnv` and a server of the published package, which has no protocol v2: a socket for each session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from openenv import AsyncVectorEnv, VectorEnv
from openenv.errors import (
    ConnectFailed,
    EnvironmentFactoryError,
    ExecutionError,
    RequestValidationError,
    SessionCapacityError,
    SlotsFailed,
)
from program_interpreters import Interpreter
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.published]

SESSIONS = "16"


@pytest.fixture
def old(server: Callable[..., Any], published: Interpreter) -> str:
    """A server of the published package, with 16 slots."""
    url: str = server(published, MAX_CONCURRENT_ENVS=SESSIONS).url
    return url


def connected(url: str, n: int, **options: Any) -> VectorEnv[Any, Any]:
    """Connect; slots that another test has just freed may take a moment to be free."""

    def connect() -> VectorEnv[Any, Any] | None:
        with contextlib.suppress(SessionCapacityError):
            return VectorEnv(url, n, **options).connect()
        return None

    vector = wait_until(connect, message="the server stays full", every_s=0.05)
    assert vector is not None
    return vector


def amounts(*numbers: int) -> list[dict[str, Any]]:
    return [{"amount": number} for number in numbers]


@pytest.mark.parametrize("codec", ["auto", "json"])
def test_an_old_server_is_stepped_like_any_other(old: str, codec: Any) -> None:
    with connected(old, 12, codec=codec, autoreset="same_step") as env:
        assert env.codecs == ["v1"] * 12
        first = env.reset(seed=5, start=1)
        assert [seen["seed"] for seen in first.observations if seen] == list(range(5, 17))
        result = env.step(amounts(*range(12)))
        assert result.rewards.tolist() == [number / 2 for number in range(12)]
        assert result.dones.tolist() == [number + 1 >= 10 for number in range(12)]
        assert [final and final.observation["total"] for final in result.finals] == [None] * 9 + [10, 11, 12]
        assert [seen["total"] for seen in result.observations if seen] == [*range(1, 10), 1, 1, 1]
        assert [state["total"] for state in env.states()] == [*range(1, 10), 1, 1, 1]


def test_slots_that_are_ready_first_are_returned_first(old: str) -> None:
    with connected(old, 6) as env:
        env.reset()
        env.step_async(amounts(1, 1, 1, 1, 1, 1))
        counted = {slot: 0 for slot in range(6)}
        while min(counted.values()) < 3:
            ready = env.step_wait(k=2)
            for slot, seen in zip(ready.slots, ready.observations, strict=True):
                counted[slot] += 1
                assert seen is not None
                assert seen["total"] == counted[slot]
            env.step_async({slot: {"amount": 1} for slot in ready.slots if counted[slot] < 5})


@pytest.mark.parametrize("policy", ["raise", "mask", "restart"])
def test_failures_of_single_slots_follow_the_policy(old: str, policy: Any) -> None:
    with connected(old, 3, on_failure=policy) as env:
        env.reset()
        try:
            result = env.step([{"amount": 2}, {"amount": 1, "fail": "no"}, {"amount": 1000}])
        except SlotsFailed as exc:
            assert policy == "raise"
            result = exc.result
        assert [type(result.errors[slot]) for slot in (1, 2)] == [ExecutionError, RequestValidationError]
        assert [one.restarted for one in result.by_slot] == [False, policy == "restart", False]
        assert result.rewards.tolist()[0] == 1.0


def test_typed_results_come_from_the_client_class(old: str) -> None:
    from sample_env.client import CounterEnv
    from sample_env.models import CounterAction

    with connected(old, 2, client=CounterEnv) as env:
        env.reset()
        result = env.step([CounterAction(amount=1), CounterAction(amount=2)])
        assert [seen and seen.total for seen in result.observations] == [1, 2]
        assert [state.total for state in env.states()] == [1, 2]


def test_old_and_new_servers_work_side_by_side(old: str, server: Callable[..., Any], ours: Interpreter) -> None:
    new = server(ours, MAX_CONCURRENT_ENVS=SESSIONS).url
    with connected([old, new], 8) as env:  # type: ignore[arg-type]
        assert sum(name == "v1" for name in env.codecs) == 4
        env.reset()
        assert env.step(amounts(*range(8))).rewards.tolist() == [number / 2 for number in range(8)]


def test_an_old_server_is_stepped_from_an_event_loop(old: str) -> None:
    async def play() -> list[float]:
        async with AsyncVectorEnv(old, 2) as env:
            await env.reset()
            rewards: list[float] = (await env.step(amounts(1, 2))).rewards.tolist()
            return rewards

    connected(old, 2).close()
    assert asyncio.run(play()) == [0.5, 1.0]


def test_a_server_with_one_slot_is_reported_at_once_and_with_advice(
    server: Callable[..., Any], published: Interpreter
) -> None:
    url = server(published).url
    with pytest.raises(SessionCapacityError, match=r"max_concurrent_envs.*by default 1"):
        VectorEnv(url, 3).connect()
    with connected(url, 1) as env:
        assert env.reset().ok.all()


def test_an_environment_that_cannot_be_built_is_reported_at_once(
    server: Callable[..., Any], published: Interpreter
) -> None:
    url = server(published, MAX_CONCURRENT_ENVS=SESSIONS, COUNTER_IS_BROKEN="1").url
    with pytest.raises(EnvironmentFactoryError):
        VectorEnv(url, 2).connect()


@pytest.mark.parametrize(
    ("options", "advice"), [({"codec": "msgpack"}, "codec='json'"), ({"protocol": "v2"}, "'auto'")]
)
def test_what_an_old_server_cannot_do_is_said_at_once(old: str, options: Any, advice: str) -> None:
    with pytest.raises(ConnectFailed, match=advice) as caught:
        VectorEnv(old, 2, **options).connect()
    assert caught.value.attempts == 1
