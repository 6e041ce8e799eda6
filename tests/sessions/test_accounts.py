"""Limits for each key and for agents: exact whoever asks at the same time, and as quick to check with many sessions."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from environments import Idle
from openenv.errors import SessionCapacityError
from openenv.sessions.lifetime import SessionLimits
from openenv.sessions.manager import SessionManager
from openenv.sessions.session import Account, SessionKind


class Compared(str):
    """A key that counts how often it is compared."""

    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        type(self).times += 1
        return str.__eq__(self, other)


def test_a_refusal_does_not_look_at_every_session() -> None:
    async def main() -> None:
        manager = SessionManager(Idle, SessionLimits(sessions=300, per_key=200), runner="inline")
        for _ in range(200):
            await manager.open(SessionKind.HTTP, account=Account(Compared("team")))
        Compared.times = 0
        for _ in range(10):
            try:
                await manager.open_in_turn(SessionKind.HTTP, account=Account(Compared("team")))
            except SessionCapacityError:
                continue
            raise AssertionError("the key has as many as it may")
        assert Compared.times < 500
        await manager.drain()

    asyncio.run(main())


def test_slots_that_come_back_count_no_more() -> None:
    async def main() -> None:
        limits = SessionLimits(sessions=8, per_key=2, agents=1)
        manager = SessionManager(Idle, limits, runner="inline")
        for _ in range(20):
            first = await manager.open_in_turn(SessionKind.HTTP, account=Account("a", is_agent=True))
            second = await manager.open_in_turn(SessionKind.HTTP, account=Account("a"))
            assert manager.reserve_at_once(SessionKind.HTTP, account=Account("a")) is None
            assert manager.reserve_at_once(SessionKind.HTTP, account=Account("b", is_agent=True)) is None
            other = await manager.open_in_turn(SessionKind.HTTP, account=Account("b"))
            for session in (first, second, other):
                session.close()
            assert manager.active == 0
        assert not manager.slots._of_key
        await manager.drain()

    asyncio.run(main())


def test_threads_that_ask_at_the_same_time_get_no_more_than_the_key_may_have() -> None:
    limits = SessionLimits(sessions=64, per_key=3)
    manager = SessionManager(Idle, limits, runner="inline")
    found: list[Any] = []
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait(30)
        for _ in range(8):
            session = manager.slots.reserve_at_once(SessionKind.HTTP, Account("team"))
            if session is not None:
                found.append(session)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3
