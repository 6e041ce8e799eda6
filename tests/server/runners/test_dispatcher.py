"""The way back to the loop: order, batching, failures of one delivery, closed loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from openenv.server.runners import Dispatcher, current_dispatcher


class Result:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def deliver(self) -> None:
        self._function()


@pytest.mark.anyio
async def test_a_loop_has_one_dispatcher() -> None:
    assert current_dispatcher() is current_dispatcher()
    assert current_dispatcher().is_current
    assert not await asyncio.to_thread(lambda dispatcher: dispatcher.is_current, current_dispatcher())


def test_two_loops_have_two_dispatchers() -> None:
    async def dispatcher() -> Dispatcher:
        return current_dispatcher()

    assert asyncio.run(dispatcher()) is not asyncio.run(dispatcher())


@pytest.mark.anyio
async def test_results_of_many_threads_all_arrive_in_each_threads_order() -> None:
    dispatcher, arrived = current_dispatcher(), []
    all_there = asyncio.Event()

    def take(item: tuple[int, int]) -> None:
        assert dispatcher.is_current
        arrived.append(item)
        if len(arrived) == 4 * 500:
            all_there.set()

    def post(thread: int) -> None:
        for i in range(500):
            dispatcher.post(Result(lambda i=i: take((thread, i))))  # type: ignore[misc]

    threads = [threading.Thread(target=post, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(all_there.wait(), 30)
    for n, thread in enumerate(threads):
        await asyncio.to_thread(thread.join)
        assert [i for owner, i in arrived if owner == n] == list(range(500))


@pytest.mark.anyio
async def test_a_delivery_that_fails_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher, came = current_dispatcher(), asyncio.Event()

    def fail() -> None:
        raise RuntimeError("broken receiver")

    dispatcher.post(Result(fail))
    dispatcher.post(Result(came.set))
    await asyncio.wait_for(came.wait(), 30)
    assert "broken receiver" in caplog.text


@pytest.mark.anyio
async def test_a_delivery_may_post_another() -> None:
    dispatcher, came = current_dispatcher(), asyncio.Event()
    dispatcher.post(Result(lambda: dispatcher.post(Result(came.set))))
    await asyncio.wait_for(came.wait(), 30)


def test_posting_to_a_closed_loop_is_silent() -> None:
    loop = asyncio.new_event_loop()
    dispatcher = Dispatcher(loop)
    loop.close()
    dispatcher.post(Result(lambda: None))
    dispatcher.post(Result(lambda: None))


@pytest.mark.anyio
async def test_a_dispatcher_is_at_hand_in_its_running_loops_thread_only() -> None:
    dispatcher = current_dispatcher()
    assert dispatcher.is_at_hand
    assert not await asyncio.to_thread(lambda: dispatcher.is_at_hand)


def test_a_dispatcher_whose_loop_has_ended_is_not_at_hand() -> None:
    async def dispatcher() -> Dispatcher:
        return current_dispatcher()

    ended = asyncio.run(dispatcher())
    assert not ended.is_at_hand


def test_a_dispatcher_goes_with_its_loop_to_another_thread() -> None:
    loop = asyncio.new_event_loop()

    async def look() -> bool:
        return current_dispatcher().is_at_hand

    try:
        assert loop.run_until_complete(look())
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(loop.run_until_complete(look())))
        thread.start()
        thread.join(10)
        assert seen == [True]
    finally:
        loop.close()


@pytest.mark.anyio
async def test_what_is_put_off_to_the_end_of_the_pass_is_done_in_order_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher, done = current_dispatcher(), []

    def fail() -> None:
        raise ValueError("not this one")

    def again() -> None:
        dispatcher.at_end_of_pass(done.append, "later")

    dispatcher.at_end_of_pass(done.append, 1)
    dispatcher.at_end_of_pass(fail)
    dispatcher.at_end_of_pass(again)
    dispatcher.at_end_of_pass(done.append, 2)
    assert not done
    await asyncio.sleep(0)
    assert done == [1, 2]
    await asyncio.sleep(0)
    assert done == [1, 2, "later"]
    assert "could not be handed over" in caplog.text
