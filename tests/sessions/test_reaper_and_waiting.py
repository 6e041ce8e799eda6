"""The reaper's timer and the line of those who wait for a change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from openenv.sessions.lifetime import Reaper
from openenv.sessions.slots import WaitQueue, wait_until

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or fail."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true in time")


async def test_the_reaper_looks_until_there_is_nothing_to_watch() -> None:
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        return len(looks) < 3

    reaper = Reaper(look, period_s=0.01)
    reaper.ensure_running()
    reaper.ensure_running()
    await until(lambda: len(looks) == 3)
    await asyncio.sleep(0.05)
    assert len(looks) == 3
    reaper.ensure_running()
    await until(lambda: len(looks) == 4)
    await asyncio.sleep(0.05)
    assert len(looks) == 4


async def test_a_stopped_reaper_looks_no_more() -> None:
    looks: list[int] = []
    reaper = Reaper(lambda: bool(looks.append(1)) or True, period_s=0.01)
    reaper.ensure_running()
    reaper.stop()
    await asyncio.sleep(0.05)
    assert looks == []


def test_the_reaper_moves_to_another_loop_when_its_own_is_closed() -> None:
    looks: list[int] = []
    reaper = Reaper(lambda: bool(looks.append(1)), period_s=0.01)

    async def arm(condition: Callable[[], bool]) -> None:
        reaper.ensure_running()
        await until(condition)

    asyncio.run(arm(lambda: True))
    asyncio.run(arm(lambda: bool(looks)))
    assert looks == [1]


async def test_a_change_from_any_thread_wakes_everybody() -> None:
    signal = WaitQueue()
    waiting = [signal.subscribe() for _ in range(3)]
    threading.Thread(target=signal.notify_all).start()
    assert all(await asyncio.gather(*(wait_until(future, None) for future in waiting)))


async def test_waiting_ends_at_its_deadline() -> None:
    signal, loop = WaitQueue(), asyncio.get_running_loop()
    change = signal.subscribe()
    assert not await wait_until(change, loop.time() - 1)
    assert not await wait_until(change, loop.time() + 0.01)
    signal.unsubscribe(change)
    signal.notify_all()
    await asyncio.sleep(0)
    assert not change.done()


def test_a_waiter_of_a_closed_loop_is_forgotten() -> None:
    signal = WaitQueue()

    async def subscribe() -> None:
        signal.subscribe()

    asyncio.run(subscribe())
    signal.notify_all()
