"""Messages that mean much work are handled one in each pass of the loop, in order, and none is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

from openenv.server.backpressure import Backpressure, LoopTurns
from openenv.server.runners import loop_local

LARGE = 100


class Wire:
    """Stands for a socket that may be paused."""

    def __init__(self) -> None:
        self.is_full = False
        self.pauses = 0
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True
        self.pauses += 1

    def resume(self) -> None:
        self.is_paused = False


def queue(turns: LoopTurns, seen: list[Any], name: str) -> tuple[Backpressure, Wire]:
    wire = Wire()
    taken: Any = wire

    def take(payload: bytes, binary: bool) -> None:
        seen.append((name, len(payload)))

    return Backpressure(taken, take, lambda: False, is_long=lambda payload: len(payload) >= LARGE, turns=turns), wire


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_large_message_is_taken_in_each_pass() -> None:
    async def scenario() -> None:
        turns = loop_local(asyncio.get_running_loop(), LoopTurns)
        seen: list[Any] = []
        queues = [queue(turns, seen, name)[0] for name in "abc"]
        for one in queues:
            one.receive(b"x" * LARGE, False)
        assert seen == [("a", LARGE)]
        for count in (2, 3):
            while len(seen) < count:
                await passes(1)
            assert len(seen) == count
        assert [name for name, _ in seen] == ["a", "b", "c"]
        await passes(3)
        queues[2].receive(b"x" * LARGE, False)  # no turn is taken any more
        assert len(seen) == 4

    asyncio.run(scenario())


def test_small_messages_do_not_wait_unless_their_own_connection_does() -> None:
    async def scenario() -> None:
        turns = loop_local(asyncio.get_running_loop(), LoopTurns)
        seen: list[Any] = []
        first, second = queue(turns, seen, "a")[0], queue(turns, seen, "b")
        third = queue(turns, seen, "c")[0]
        first.receive(b"x" * LARGE, False)
        second[0].receive(b"x" * LARGE, False)
        second[0].receive(b"after it", False)
        third.receive(b"small", False)
        assert seen == [("a", LARGE), ("c", 5)]
        assert second[1].is_paused  # or it could make us hold whatever it sends
        await passes(5)
        assert seen == [("a", LARGE), ("c", 5), ("b", LARGE), ("b", 8)]
        assert not second[1].is_paused

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_not_served_in_its_turn_but_afterwards() -> None:
    async def scenario() -> None:
        turns = loop_local(asyncio.get_running_loop(), LoopTurns)
        seen: list[Any] = []
        first, (second, wire) = queue(turns, seen, "a")[0], queue(turns, seen, "b")
        first.receive(b"x" * LARGE, False)
        second.receive(b"y" * LARGE, False)
        wire.is_full = True
        await passes(5)
        assert seen == [("a", LARGE)]
        assert wire.is_paused
        wire.is_full = False
        second.resume()
        assert seen == [("a", LARGE), ("b", LARGE)]
        assert not wire.is_paused

    asyncio.run(scenario())


def test_what_a_client_that_has_gone_was_waiting_with_is_dropped() -> None:
    async def scenario() -> None:
        turns = loop_local(asyncio.get_running_loop(), LoopTurns)
        seen: list[Any] = []
        first, second = queue(turns, seen, "a")[0], queue(turns, seen, "b")[0]
        first.receive(b"x" * LARGE, False)
        second.receive(b"y" * LARGE, False)
        second.drop()
        await passes(5)
        assert seen == [("a", LARGE)]

    asyncio.run(scenario())
