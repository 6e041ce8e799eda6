"""The line for slots: bounded, in order, with places that can be asked for."""

from __future__ import annotations

import asyncio

import pytest

from openenv.sessions.slots import AdmissionQueue, Ticket

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def joined(queue: AdmissionQueue) -> Ticket:
    ticket = queue.join()
    assert ticket is not None
    return ticket


async def is_called(ticket: Ticket) -> bool:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return ticket.called.done()


async def test_whoever_came_first_is_called_first() -> None:
    queue = AdmissionQueue(10)
    first, second = joined(queue), joined(queue)
    queue.call_next()
    assert (await is_called(first), await is_called(second)) == (True, False)
    queue.call_next()
    assert not await is_called(second)  # whoever is first has not tried yet
    queue.leave(first)
    assert await is_called(second)


async def test_the_line_has_an_end() -> None:
    queue = AdmissionQueue(1)
    first = joined(queue)
    assert queue.join() is None
    queue.leave(first)
    assert queue.join() is not None


async def test_a_turn_that_is_not_used_goes_to_the_next() -> None:
    queue = AdmissionQueue(10)
    first, second = joined(queue), joined(queue)
    queue.call_next()
    queue.leave(first)
    assert await is_called(second)


async def test_whoever_found_no_slot_keeps_the_place() -> None:
    queue = AdmissionQueue(10)
    first, second = joined(queue), joined(queue)
    queue.call_next()
    assert await is_called(first)
    queue.wait_again(first)
    queue.call_next()
    assert (await is_called(first), await is_called(second)) == (True, False)


async def test_a_free_slot_is_for_whoever_is_first() -> None:
    queue = AdmissionQueue(10)
    tickets = [joined(queue) for _ in range(3)]
    for _ in range(5):  # however often the line is called
        queue.call_next()
    assert [queue.is_next(ticket) for ticket in tickets] == [True, False, False]
    queue.leave(tickets[0])
    assert [queue.is_next(ticket) for ticket in tickets[1:]] == [True, False]


async def test_whoever_stands_aside_lets_others_pass_and_keeps_the_place() -> None:
    queue = AdmissionQueue(10)
    first, second = joined(queue), joined(queue)
    queue.stand_aside(first)
    assert (queue.is_next(first), queue.is_next(second)) == (False, True)
    assert (await is_called(first), await is_called(second)) == (False, True)
    queue.slot_freed()
    assert (queue.is_next(first), queue.is_next(second)) == (True, False)
    assert await is_called(first)


async def test_places_are_counted_from_the_front() -> None:
    now = 0.0
    queue = AdmissionQueue(10, clock=lambda: now)
    first, second, third = joined(queue), joined(queue), joined(queue)
    assert [queue.position(ticket) for ticket in (first, second, third)] == [1, 2, 3]
    queue.leave(first)
    now = 10.0
    assert [queue.position(ticket) for ticket in (second, third)] == [1, 2]
