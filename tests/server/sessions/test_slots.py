"""The queue for slots: bounded, in order, with positions; and limits for each key and for agents."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from environments import Idle
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.manager import SessionManager
from openenv.server.sessions.session import SessionKind
from openenv.server.sessions.slots import CapacityQueue, Ticket

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def joined(queue: CapacityQueue) -> Ticket:
    ticket = queue.join()
    assert ticket is not None
    return ticket


async def is_called(ticket: Ticket) -> bool:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return ticket.called.done()


async def test_the_first_ticket_is_called_first() -> None:
    queue = CapacityQueue(10)
    first, second = joined(queue), joined(queue)
    queue.call_next()
    assert (await is_called(first), await is_called(second)) == (True, False)
    queue.call_next()
    assert not await is_called(second)  # the first one has not tried yet
    queue.leave(first)
    assert await is_called(second)


async def test_the_queue_is_bounded() -> None:
    queue = CapacityQueue(1)
    first = joined(queue)
    assert queue.join() is None
    queue.leave(first)
    assert queue.join() is not None


async def test_a_call_that_is_not_used_goes_to_the_next_ticket() -> None:
    queue = CapacityQueue(10)
    first, second = joined(queue), joined(queue)
    queue.call_next()
    queue.leave(first)
    assert await is_called(second)


async def test_a_ticket_that_got_no_slot_keeps_its_place() -> None:
    queue = CapacityQueue(10)
    first, second = joined(queue), joined(queue)
    queue.call_next()
    assert await is_called(first)
    queue.wait_again(first)
    queue.call_next()
    assert (await is_called(first), await is_called(second)) == (True, False)


async def test_a_free_slot_is_for_the_first_ticket() -> None:
    queue = CapacityQueue(10)
    tickets = [joined(queue) for _ in range(3)]
    for _ in range(5):  # however often the queue is called
        queue.call_next()
    assert [queue.is_next(ticket) for ticket in tickets] == [True, False, False]
    queue.leave(tickets[0])
    assert [queue.is_next(ticket) for ticket in tickets[1:]] == [True, False]


async def test_a_ticket_that_stands_aside_lets_others_pass_and_keeps_its_place() -> None:
    queue = CapacityQueue(10)
    first, second = joined(queue), joined(queue)
    queue.stand_aside(first)
    assert (queue.is_next(first), queue.is_next(second)) == (False, True)
    assert (await is_called(first), await is_called(second)) == (False, True)
    queue.slot_freed()
    assert (queue.is_next(first), queue.is_next(second)) == (True, False)
    assert await is_called(first)


async def test_positions_are_counted_from_the_front() -> None:
    now = 0.0
    queue = CapacityQueue(10, clock=lambda: now)
    first, second, third = joined(queue), joined(queue), joined(queue)
    assert [queue.position(ticket) for ticket in (first, second, third)] == [1, 2, 3]
    queue.leave(first)
    now = 10.0
    assert [queue.position(ticket) for ticket in (second, third)] == [1, 2]


async def test_a_change_from_any_thread_calls_every_ticket() -> None:
    queue = CapacityQueue()
    tickets = [joined(queue) for _ in range(3)]
    threading.Thread(target=queue.call_all).start()
    assert all(await asyncio.gather(*(ticket.wait(None) for ticket in tickets)))


async def test_waiting_ends_at_its_deadline() -> None:
    queue, loop = CapacityQueue(), asyncio.get_running_loop()
    ticket = joined(queue)
    assert not await ticket.wait(loop.time() - 1)
    assert not await ticket.wait(loop.time() + 0.01)
    queue.leave(ticket)
    queue.call_all()
    assert not await is_called(ticket)


def test_a_ticket_of_a_closed_loop_is_forgotten() -> None:
    queue = CapacityQueue()

    async def join() -> None:
        joined(queue)

    asyncio.run(join())
    queue.call_all()
    assert len(queue) == 0


def test_slots_that_are_given_back_no_longer_count() -> None:
    async def main() -> None:
        manager = SessionManager(Idle, SessionLimits(sessions=8, agents=1), runner="inline")
        for _ in range(20):
            first = await manager.open(SessionKind.HTTP, by_agent=True)
            assert manager.reserve_at_once(SessionKind.HTTP, by_agent=True) is None
            other = await manager.open(SessionKind.HTTP)
            for session in (first, other):
                session.close()
            assert manager.active == 0
        await manager.drain()

    asyncio.run(main())


def test_threads_that_reserve_at_the_same_time_get_no_more_than_agents_may_have() -> None:
    limits = SessionLimits(sessions=64, agents=3)
    manager = SessionManager(Idle, limits, runner="inline")
    sessions: list[Any] = []
    ready = threading.Barrier(8)

    def reserve() -> None:
        ready.wait(30)
        for _ in range(8):
            session = manager.slots.reserve_at_once(SessionKind.HTTP, by_agent=True)
            if session is not None:
                sessions.append(session)

    threads = [threading.Thread(target=reserve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(sessions) == 3
