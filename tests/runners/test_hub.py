"""The way back to the loop: order, batching, failures of one delivery, closed loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from openenv.runners import Hub, current_hub


class Parcel:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def deliver(self) -> None:
        self._function()


@pytest.mark.anyio
async def test_a_loop_has_one_hub() -> None:
    assert current_hub() is current_hub()
    assert current_hub().is_current
    assert not await asyncio.to_thread(lambda hub: hub.is_current, current_hub())


def test_two_loops_have_two_hubs() -> None:
    async def hub() -> Hub:
        return current_hub()

    assert asyncio.run(hub()) is not asyncio.run(hub())


@pytest.mark.anyio
async def test_results_of_many_threads_all_arrive_in_each_threads_order() -> None:
    hub, arrived = current_hub(), []
    all_there = asyncio.Event()

    def take(item: tuple[int, int]) -> None:
        assert hub.is_current
        arrived.append(item)
        if len(arrived) == 4 * 500:
            all_there.set()

    def post(thread: int) -> None:
        for i in range(500):
            hub.post(Parcel(lambda i=i: take((thread, i))))  # type: ignore[misc]

    threads = [threading.Thread(target=post, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(all_there.wait(), 10)
    for n, thread in enumerate(threads):
        await asyncio.to_thread(thread.join)
        assert [i for owner, i in arrived if owner == n] == list(range(500))


@pytest.mark.anyio
async def test_a_delivery_that_fails_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    hub, came = current_hub(), asyncio.Event()

    def fail() -> None:
        raise RuntimeError("broken receiver")

    hub.post(Parcel(fail))
    hub.post(Parcel(came.set))
    await asyncio.wait_for(came.wait(), 10)
    assert "broken receiver" in caplog.text


@pytest.mark.anyio
async def test_a_delivery_may_post_another() -> None:
    hub, came = current_hub(), asyncio.Event()
    hub.post(Parcel(lambda: hub.post(Parcel(came.set))))
    await asyncio.wait_for(came.wait(), 10)


def test_posting_to_a_closed_loop_is_silent() -> None:
    loop = asyncio.new_event_loop()
    hub = Hub(loop)
    loop.close()
    hub.post(Parcel(lambda: None))
    hub.post(Parcel(lambda: None))
