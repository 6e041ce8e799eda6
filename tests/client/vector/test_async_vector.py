"""`AsyncVectorEnv`: the same operations, awaited; the loop is never blocked and a cancelled call loses nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from openenv import AsyncVectorEnv, VectorEnv
from openenv.errors import ClientModeError, ConnectFailed, RequestTimeout, SlotsFailed
from waiting import holds_for_async, wait_until_async

pytestmark = pytest.mark.anyio

FINE = {"add": 1}


async def test_steps_and_results_are_those_of_the_blocking_one(adder: Any) -> None:
    async with AsyncVectorEnv(adder.url, 3) as env:
        first = await env.reset(seed=7)
        assert [seen["seed"] for seen in first.observations] == [7, 8, 9]
        result = await env.step([{"add": 1}, {"add": 2}, {"add": 3}])
        assert list(result.rewards) == [1.0, 2.0, 3.0]
        states = await env.states()
        assert [state["step_count"] for state in states] == [1, 1, 1]
        assert (env.n, len(env), len([name for name in env.sessions if name])) == (3, 3, 3)
        assert env.codecs[0] is not None
        assert min(env.traffic) > 0
        assert repr(env) == f"<AsyncVectorEnv of 3 sessions at {adder.url}>"
    adder.wait_for(lambda: adder.manager.active == 0)


async def test_the_loop_runs_on_while_slots_are_waited_for(adder: Any, adder_cls: Any) -> None:
    async with AsyncVectorEnv(adder.url, 2) as env:
        await env.reset()
        step = asyncio.ensure_future(env.step([FINE, {"wait": "gate"}]))
        await holds_for_async(0.2, lambda: not step.done())
        adder_cls.gates["gate"].set()
        assert (await step).ok.all()


async def test_several_of_them_run_side_by_side(adder: Any) -> None:
    async with AsyncVectorEnv(adder.url, 2) as one, AsyncVectorEnv(adder.url, 2) as other:
        await asyncio.gather(one.reset(), other.reset())
        results = await asyncio.gather(*(env.step([FINE, FINE]) for env in (one, other)))
        assert all(result.ok.all() for result in results)


async def test_the_first_that_are_ready_can_be_waited_for(adder: Any, adder_cls: Any) -> None:
    async with AsyncVectorEnv(adder.url, 4) as env:
        await env.reset()
        await env.step_async([FINE, FINE, FINE, {"wait": "slow"}], each=True)
        ready = await env.step_wait(k=2)
        assert 2 <= len(ready.slots) <= 3
        adder_cls.gates["slow"].set()
        rest = await env.step_wait()
        assert sorted([*ready.slots, *rest.slots]) == [0, 1, 2, 3]


async def test_a_cancelled_step_is_returned_by_the_next_wait(adder: Any, adder_cls: Any) -> None:
    async with AsyncVectorEnv(adder.url, 2) as env:
        await env.reset()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step([FINE, {"add": 5, "wait": "gate"}]), 0.2)
        with pytest.raises(ClientModeError, match="step_wait"):
            await env.step([FINE, FINE])
        adder_cls.gates["gate"].set()
        result = await env.step_wait()
        assert list(result.rewards) == [1.0, 5.0]
        assert (await env.step([FINE, FINE])).ok.all()
    assert adder_cls.ran["step"] == 4


async def test_a_reset_forgets_a_step_that_was_not_awaited(adder: Any, adder_cls: Any) -> None:
    async with AsyncVectorEnv(adder.url, 1) as env:
        await env.reset()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step([{"wait": "gate"}]), 0.2)
        adder_cls.gates["gate"].set()
        assert (await env.reset()).observations[0]["steps"] == 0
        assert (await env.step([FINE])).observations[0]["steps"] == 1


async def test_failures_are_the_same(adder: Any) -> None:
    async with AsyncVectorEnv(adder.url, 2) as env:
        await env.reset()
        with pytest.raises(SlotsFailed) as caught:
            await env.step([FINE, {"fail": True}])
        assert set(caught.value.errors) == {1}
        with pytest.raises(ValueError, match="one for each"):
            await env.step([FINE])


async def test_a_wait_that_takes_too_long_is_a_timeout_and_can_be_repeated(adder: Any, adder_cls: Any) -> None:
    async with AsyncVectorEnv(adder.url, 1) as env:
        await env.reset()
        await env.step_async([{"wait": "gate"}])
        with pytest.raises(RequestTimeout):
            await env.step_wait(0.1)
        adder_cls.gates["gate"].set()
        assert (await env.step_wait()).ok.all()


async def test_closing_ends_a_wait_and_all_sessions(adder: Any, adder_cls: Any) -> None:
    env: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(adder.url, 2)
    await env.reset()
    step = asyncio.ensure_future(env.step([FINE, {"wait": "gate"}]))
    await holds_for_async(0.1, lambda: not step.done())
    await asyncio.wait_for(env.close(), 10)
    with pytest.raises(RequestTimeout, match="closed"):
        await step
    adder_cls.gates["gate"].set()
    await env.close()
    with pytest.raises(ClientModeError, match="closed"):
        await env.reset()
    await asyncio.to_thread(adder.wait_for, lambda: adder.manager.active == 0)


async def test_a_server_that_is_not_there_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConnectFailed):
        async with AsyncVectorEnv("http://127.0.0.1:9", 2, retry_refused_s=0):
            raise AssertionError("unreachable")
    await wait_until_async(lambda: set(threading.enumerate()) <= before, message="a thread is left")


def test_it_has_every_operation_of_the_blocking_one() -> None:
    def public(cls: type[Any]) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(VectorEnv) - public(AsyncVectorEnv) == {"interrupt", "keep_alive"}


def test_a_blocking_wait_in_another_thread_ends_when_it_is_closed(adder: Any, adder_cls: Any) -> None:
    env: VectorEnv[Any, Any] = VectorEnv(adder.url, 1)
    env.reset()
    env.step_async([{"wait": "gate"}])
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            env.step_wait(20)
        except RequestTimeout as exc:
            caught.append(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    env.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert [str(exc) for exc in caught] in ([], ["closed while slots were waited for"])
    adder_cls.gates["gate"].set()
