"""The reaper's timer, and leases by a steady clock: a wall clock that is set ends no session and keeps none."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from environments import Idle
from openenv.server.sessions.lifetime import ClosedEnvironments, Reaper, SessionLimits
from openenv.server.sessions.manager import SessionClocks, SessionManager
from openenv.server.sessions.session import SessionKind
from waiting import holds_for_async, wait_until_async

pytestmark = pytest.mark.anyio


async def test_the_reaper_looks_until_there_is_nothing_to_watch() -> None:
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        return len(looks) < 3

    reaper = Reaper(look, period_s=0.01)
    reaper.ensure_running()
    reaper.ensure_running()
    await wait_until_async(lambda: len(looks) == 3)
    await holds_for_async(0.05, lambda: len(looks) == 3)
    reaper.ensure_running()
    await wait_until_async(lambda: len(looks) == 4)
    await holds_for_async(0.05, lambda: len(looks) == 4)


async def test_a_stopped_reaper_looks_no_more() -> None:
    looks: list[int] = []
    reaper = Reaper(lambda: bool(looks.append(1)) or True, period_s=0.01)
    reaper.ensure_running()
    reaper.stop()
    await holds_for_async(0.05, lambda: looks == [])


def test_the_reaper_moves_to_another_loop_when_its_own_is_closed() -> None:
    looks: list[int] = []
    reaper = Reaper(lambda: bool(looks.append(1)), period_s=0.01)

    async def arm(condition: Callable[[], bool]) -> None:
        reaper.ensure_running()
        await wait_until_async(condition)

    asyncio.run(arm(lambda: True))
    asyncio.run(arm(lambda: bool(looks)))
    assert looks == [1]


# The clock is set before anything of ours is loaded, as it is set under a process that runs.
SCRIPT = """
import asyncio, sys, time
real, shift = time.time, [0.0]
time.time = lambda: real() + shift[0]
from openenv.env.environment import Environment
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.manager import SessionManager
from openenv.server.sessions.session import SessionKind

class Nothing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs): ...
    def step(self, action, timeout_s=None, **kwargs): ...
    @property
    def state(self): ...

async def main():
    manager = SessionManager(Nothing, SessionLimits(sessions=2, idle_s=float(sys.argv[2])))
    session = await manager.open(SessionKind.HTTP)
    shift[0] = float(sys.argv[1])
    manager._expired()
    print(session.state.value, abs(manager.info(session.id).created_at - time.time()) < 300)
    await manager.drain()

asyncio.run(main())
"""


@pytest.mark.parametrize("by_s", [-86_400, 0, 86_400], ids=["back", "not", "forwards"])
def test_setting_the_clock_ends_no_session_and_its_times_are_shown_as_on_the_wall(by_s: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(by_s), "600"], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ready", "True"], done.stderr


def test_times_are_shown_by_one_clock_and_ages_counted_by_the_other() -> None:
    async def main() -> None:
        steady, wall = [10.0], [1_000_000.0]
        limits = SessionLimits(sessions=1, idle_s=60.0, soft_idle_s=60.0)
        manager = SessionManager(Idle, limits, clocks=SessionClocks(lambda: steady[0], lambda: wall[0]))
        session = await manager.open(SessionKind.HTTP)
        wall[0] -= 500.0
        steady[0] += 30.0
        manager._expired()
        info = manager.info(session.id)
        assert info is not None
        assert (info.created_at, info.last_activity_at) == (999_470.0, 999_470.0)
        steady[0] += 31.0
        manager._expired()
        assert session.close_reason == "expired"
        await manager.drain()

    asyncio.run(main())


class Plain:
    """An environment that is freed without the garbage collector."""


class Ring:
    """An environment that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_young_closed_environments_need_no_full_garbage_collection() -> None:
    generations: list[int] = []

    def collect(generation: int) -> int:
        generations.append(generation)
        return gc.collect(generation)

    closed = ClosedEnvironments(lambda: 0, collect)
    rings = []
    for _ in range(64):
        ring = Ring()
        rings.append(weakref.ref(ring))
        closed.add(ring)
        del ring
    assert set(generations) == {1}
    assert sum(ref() is not None for ref in rings) < 16


def test_closed_environments_that_stay_get_a_full_collection_and_then_longer_pauses() -> None:
    generations: list[int] = []
    closed = ClosedEnvironments(lambda: 0, lambda generation: generations.append(generation))
    environments = [Plain() for _ in range(48)]
    for environment in environments[:16]:
        closed.add(environment)
    assert generations == [1, 2]
    for environment in environments[16:47]:
        closed.add(environment)
    assert generations == [1, 2]
    closed.add(environments[47])
    assert generations == [1, 2, 1, 2]
