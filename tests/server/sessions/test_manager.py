"""The manager: slots on every path, soft sessions and their eviction, single requests, expiry, drain and resume."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from openenv.errors import (
    ConcurrencyConfigurationError,
    EnvironmentFactoryError,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
)
from openenv.server.runners import InlineRunner
from openenv.server.sessions.events import SessionEvent
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.manager import SessionClocks, SessionManager
from openenv.server.sessions.operations import CALL
from openenv.server.sessions.session import Session, SessionKind, SessionState
from slow_steps import take
from waiting import holds_for_async, wait_until_async

pytestmark = pytest.mark.anyio

SOCKET, HTTP, SOFT, ONCE = SessionKind.SOCKET, SessionKind.HTTP, SessionKind.SOFT, SessionKind.ONCE


class Env:
    SUPPORTS_CONCURRENT_SESSIONS = True
    alive = 0
    most = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        cls = type(self)
        with cls.lock:
            cls.alive += 1
            cls.most = max(cls.most, cls.alive)

    def close(self) -> None:
        cls = type(self)
        with cls.lock:
            cls.alive -= 1


class Connection:
    """Holds sessions, and records why it no longer does."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def holds_back(self, session: Session) -> bool:
        return False

    def let_go(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)


class Lonely:
    """Does not say that its sessions share nothing."""


@pytest.fixture
def env() -> type[Env]:
    """A class of its own for each test, so that counts are the test's."""

    class Fresh(Env):
        pass

    return Fresh


@asynccontextmanager
async def managing(factory: Callable[[], Any], **limits: Any) -> AsyncIterator[SessionManager]:
    clock = limits.pop("clock", time.time)
    runner = limits.pop("runner", "auto")
    manager = SessionManager(factory, SessionLimits(**limits), runner=runner, clocks=SessionClocks(clock, clock))
    try:
        yield manager
    finally:
        await manager.drain()


async def soft_session(manager: SessionManager) -> Session:
    async with manager.borrow() as session:
        assert manager.keep_soft(session)
    found: Session = session
    return found


async def test_slots_are_counted_and_freed_when_the_environment_is_closed(env: type[Env]) -> None:
    async with managing(env, sessions=2) as manager:
        first, second = await manager.open(SOCKET), await manager.open(SOCKET)
        assert manager.active == 2
        with pytest.raises(SessionCapacityError) as caught:
            await manager.open(SOCKET)
        assert (caught.value.active_sessions, caught.value.max_sessions) == (2, 2)
        first.close()
        await manager.open(SOCKET)
        assert env.most == 2, "the new environment was built after the old one was closed"
        second.close()
        await wait_until_async(lambda: manager.active == 1)


async def test_a_newcomer_waits_for_a_slot_that_is_just_coming_free(env: type[Env]) -> None:
    gate = threading.Event()
    async with managing(env, sessions=1) as manager:
        session = await manager.open(SOCKET)
        running = asyncio.ensure_future(session.run(CALL, lambda _: gate.wait(10)))
        await asyncio.sleep(0)
        session.close()
        newcomer = asyncio.ensure_future(manager.open(SOCKET))
        await holds_for_async(0.02, lambda: not newcomer.done())
        gate.set()
        await running
        assert (await newcomer).state is SessionState.READY


async def test_a_newcomer_does_not_wait_for_ever_for_a_closing_session(env: type[Env]) -> None:
    gate = threading.Event()
    async with managing(env, sessions=1, closing_wait_s=0.05) as manager:
        session = await manager.open(SOCKET)
        running = asyncio.ensure_future(session.run(CALL, lambda _: gate.wait(10)))
        await asyncio.sleep(0)
        session.close()
        with pytest.raises(SessionCapacityError):
            await manager.open(SOCKET)
        gate.set()
        await running


async def test_a_factory_that_fails_gives_its_slot_back_and_says_why() -> None:
    def fail() -> Env:
        raise OSError("no display")

    async with managing(fail, sessions=1) as manager:
        for _ in range(3):
            with pytest.raises(EnvironmentFactoryError) as caught:
                await manager.open(SOCKET)
            assert caught.value.factory_name == "fail"
            assert caught.value.reason == "OSError: no display"
            assert isinstance(caught.value.__cause__, OSError)
        await wait_until_async(lambda: manager.active == 0)


async def test_cancelling_while_the_environment_is_built_leaves_nothing_behind(env: type[Env]) -> None:
    gate = threading.Event()

    def slow() -> Env:
        assert gate.wait(10)
        return env()

    async with managing(slow, sessions=1) as manager:
        opening = asyncio.ensure_future(manager.open(SOCKET))
        await wait_until_async(lambda: manager.active == 1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        gate.set()
        await wait_until_async(lambda: manager.active == 0)
        await wait_until_async(lambda: env.alive == 0)
        assert (await manager.open(SOCKET)).state is SessionState.READY


async def test_a_session_closed_while_it_is_built_is_not_handed_out(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        with pytest.raises(SessionClosedError, match="client left"):
            await manager.open(SOCKET, on_reserved=lambda session: session.close("client left"))
        await wait_until_async(lambda: manager.active == 0)
        await wait_until_async(lambda: env.alive == 0)


async def test_only_sessions_that_clients_address_can_be_found(env: type[Env]) -> None:
    async with managing(env, sessions=3) as manager:
        named, socket = await manager.open(HTTP), await manager.open(SOCKET)
        assert manager.find(named.id) is named
        for unknown in (socket.id, "never-heard-of"):
            with pytest.raises(SessionNotFoundError):
                manager.find(unknown)


async def test_a_session_that_ended_is_remembered_as_lost(env: type[Env]) -> None:
    async with managing(env, sessions=3) as manager:
        session = await manager.open(HTTP)
        session.close("for a reason")
        with pytest.raises(SessionLost, match="for a reason"):
            manager.find(session.id)
        await wait_until_async(lambda: manager.active == 0)
        with pytest.raises(SessionLost, match="for a reason"):
            manager.find(session.id)


async def test_a_session_is_described(env: type[Env]) -> None:
    async with managing(env, sessions=1, clock=lambda: 50.0) as manager:
        session = await manager.open(HTTP)
        info = manager.info(session.id)
        assert info is not None
        assert (info.session_id, info.created_at, info.step_count) == (session.id, 50.0, 0)
        assert info.environment_type == "Fresh"
        assert manager.info("unknown") is None


async def test_more_sessions_than_the_class_supports_is_a_configuration_error() -> None:
    with pytest.raises(ConcurrencyConfigurationError, match="SUPPORTS_CONCURRENT_SESSIONS"):
        SessionManager(Lonely, SessionLimits(sessions=2))
    SessionManager(Lonely, SessionLimits(sessions=1))


async def test_an_unknown_class_that_turns_out_to_be_lonely_gets_one_slot() -> None:
    async with managing(lambda: Lonely(), sessions=4) as manager:
        assert not manager.is_concurrency_safe
        outcomes = await asyncio.gather(*(manager.open(SOCKET) for _ in range(4)), return_exceptions=True)
        assert sum(isinstance(outcome, Session) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, SessionCapacityError) for outcome in outcomes) == 3
        assert manager.max_sessions == 1


async def test_an_unknown_class_that_supports_several_gets_all_slots(env: type[Env]) -> None:
    async with managing(lambda: env(), sessions=4) as manager:
        await asyncio.gather(*(manager.open(SOCKET) for _ in range(4)))
        assert (manager.active, manager.max_sessions) == (4, 4)
        assert manager.is_concurrency_safe


@pytest.mark.parametrize("known", [True, False], ids=["class", "lambda"])
async def test_a_class_that_needs_a_single_thread_gets_one(env: type[Env], known: bool) -> None:
    class Bound(env):  # type: ignore[misc, valid-type]
        REQUIRES_SINGLE_THREAD_EXECUTOR = True

    async with managing(Bound if known else lambda: Bound(), sessions=8) as manager:
        sessions = [await manager.open(SOCKET) for _ in range(8)]
        threads = {await session.run(CALL, lambda _: threading.get_ident()) for session in sessions}
        assert len(threads) == 1


async def test_a_borrowed_environment_is_closed_after_its_request_and_takes_no_slot(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        await manager.open(SOCKET)
        async with manager.borrow() as session:
            assert session.state is SessionState.READY
            assert manager.active == 1
        await wait_until_async(lambda: env.alive == 1)


async def test_a_call_of_a_single_request_need_not_wait_for_the_environment(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        async with manager.borrow(is_built=False) as session:
            assert session.state is SessionState.CREATING
            assert await session.run(CALL, lambda env: env.alive) == 1
        await wait_until_async(lambda: env.alive == 0)


async def test_the_calls_of_a_single_request_take_turns_with_the_loop() -> None:
    class Plain:
        SUPPORTS_CONCURRENT_SESSIONS = True

    async with managing(Plain, sessions=1) as manager:
        counts = manager.runner.handovers
        async with manager.borrow(is_built=False) as session:
            thread = await session.run(CALL, lambda _: threading.get_ident())
        assert thread != threading.get_ident()
        await wait_until_async(lambda: session.state is SessionState.CLOSED)
        # One turn for the constructor and the call, one for the end; more if the machine is slow.
        assert counts.quick + counts.late + counts.apart >= 2


async def test_a_failed_constructor_answers_a_waiting_call_and_is_one_error() -> None:
    def broken() -> Any:
        raise ValueError("no licence")

    events: list[Any] = []
    async with managing(broken, sessions=1) as manager:
        manager.listeners.append(events.append)
        for _ in range(3):  # each gives its place back
            with pytest.raises(EnvironmentFactoryError, match="'broken' failed") as caught:
                async with manager.borrow(is_built=False) as session:
                    await session.run(CALL, lambda _: "unreachable")
            assert isinstance(caught.value.__cause__, ValueError)
        assert [event.reason for event in events if event.name == "error"] == [EnvironmentFactoryError.code] * 3


async def test_single_requests_wait_their_turn_and_never_exceed_the_limit(env: type[Env]) -> None:
    async def one(manager: SessionManager) -> None:
        async with manager.borrow() as session:
            await session.run(CALL, lambda _: take(0.005))

    async with managing(env, sessions=2) as manager:
        await asyncio.gather(*(one(manager) for _ in range(12)))
        assert env.most <= 2
        await wait_until_async(lambda: env.alive == 0)


async def test_a_borrower_that_fails_still_gives_the_environment_back(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        with pytest.raises(KeyError):
            async with manager.borrow():
                raise KeyError
        await wait_until_async(lambda: env.alive == 0)


async def test_a_kept_soft_session_holds_a_slot_and_can_be_found(env: type[Env]) -> None:
    async with managing(env, sessions=2) as manager:
        session = await soft_session(manager)
        assert session.kind is SOFT
        assert manager.active == 1
        assert manager.find(session.id) is session
        assert session.state is SessionState.READY


async def test_a_soft_session_makes_room_for_a_real_one(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        soft = await soft_session(manager)
        real = await manager.open(SOCKET)
        assert real.state is SessionState.READY
        with pytest.raises(SessionLost, match="evicted"):
            manager.find(soft.id)
        assert env.most <= 2


async def test_the_longest_unused_soft_session_goes_first(env: type[Env]) -> None:
    now = iter(float(i) for i in range(10_000))
    async with managing(env, sessions=2, clock=lambda: next(now)) as manager:
        first, second = await soft_session(manager), await soft_session(manager)
        await first.run(CALL, lambda _: None)
        await manager.open(SOCKET)
        assert manager.find(first.id) is first
        with pytest.raises(SessionLost):
            manager.find(second.id)


async def test_soft_sessions_are_few_and_the_oldest_is_replaced(env: type[Env]) -> None:
    async with managing(env, sessions=10, soft_sessions=2) as manager:
        kept = [await soft_session(manager) for _ in range(3)]
        with pytest.raises(SessionLost):
            manager.find(kept[0].id)
        assert [manager.find(session.id) for session in kept[1:]] == kept[1:]
        await wait_until_async(lambda: manager.active == 2)


async def test_nothing_is_kept_softly_when_real_sessions_take_every_slot(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        await manager.open(SOCKET)
        async with manager.borrow() as session:
            assert not manager.keep_soft(session)
        await wait_until_async(lambda: session.state is SessionState.CLOSED)


async def test_a_busy_soft_session_is_not_evicted_for_another_soft_one(env: type[Env]) -> None:
    gate = threading.Event()
    async with managing(env, sessions=1) as manager:
        busy = await soft_session(manager)
        running = asyncio.ensure_future(busy.run(CALL, lambda _: gate.wait(10)))
        await asyncio.sleep(0)
        async with manager.borrow() as session:
            assert not manager.keep_soft(session)
        gate.set()
        await running
        assert manager.find(busy.id) is busy


async def test_a_soft_session_that_is_stuck_cannot_keep_a_real_one_out_for_long(env: type[Env]) -> None:
    gate = threading.Event()
    async with managing(env, sessions=1, closing_wait_s=0.05) as manager:
        stuck = await soft_session(manager)
        running = asyncio.ensure_future(stuck.run(CALL, lambda _: gate.wait(10)))
        await asyncio.sleep(0)
        assert (await manager.open(SOCKET)).state is SessionState.READY
        gate.set()
        await asyncio.gather(running, return_exceptions=True)


async def test_unused_sessions_expire_and_attached_or_running_ones_do_not(env: type[Env]) -> None:
    gate, now = threading.Event(), [1000.0]
    async with managing(env, sessions=8, idle_s=0.1, soft_idle_s=0.1, clock=lambda: now[0]) as manager:
        unused, attached, running, socket = [await manager.open(kind) for kind in (HTTP, HTTP, HTTP, SOCKET)]
        soft = await soft_session(manager)
        attached.attach(Connection())
        work = asyncio.ensure_future(running.run(CALL, lambda _: gate.wait(30)))
        await asyncio.sleep(0)
        now[0] += 1
        await wait_until_async(lambda: manager.active == 3)
        await holds_for_async(0.15, lambda: manager.active == 3)
        for gone in (unused, soft):
            with pytest.raises(SessionLost, match="expired"):
                manager.find(gone.id)
        assert SessionState.CLOSED not in (attached.state, running.state, socket.state)
        gate.set()
        await work
        now[0] += 1
        await wait_until_async(lambda: manager.active == 2)


async def test_drain_stops_admitting_lets_calls_finish_and_closes_every_environment(env: type[Env]) -> None:
    manager = SessionManager(env, SessionLimits(sessions=4, drain_s=5))
    sessions = [await manager.open(kind) for kind in (SOCKET, HTTP)]
    work = asyncio.ensure_future(sessions[0].run(CALL, lambda _: take(0.05) or "finished"))
    await asyncio.sleep(0)
    await manager.drain()
    assert await work == "finished"
    assert (manager.active, env.alive, manager.runner.threads) == (0, 0, 0)
    assert manager.is_draining
    with pytest.raises(SessionCapacityError):
        await manager.open(SOCKET)
    with pytest.raises(SessionCapacityError):
        async with manager.borrow():
            pass


async def test_a_drain_ends_although_an_environment_is_stuck(env: type[Env], caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    manager = SessionManager(env, SessionLimits(sessions=1, drain_s=0.05))
    session = await manager.open(SOCKET)
    work = asyncio.ensure_future(session.run(CALL, lambda _: gate.wait(10)))
    await asyncio.sleep(0)
    await asyncio.wait_for(manager.drain(), 10)
    assert "did not end" in caplog.text
    gate.set()
    await asyncio.gather(work, return_exceptions=True)


async def test_after_a_drain_the_manager_can_be_resumed(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        for _ in range(2):
            await manager.open(SOCKET)
            await manager.drain()
            manager.resume()
        session = await manager.open(SOCKET)
        assert await session.run(CALL, lambda _: 7) == 7


async def test_limits_and_runner_can_be_changed_before_the_first_session(env: type[Env]) -> None:
    async with managing(env, sessions=1) as manager:
        manager.reconfigure(SessionLimits(sessions=3), runner="inline")
        assert (manager.max_sessions, manager.runner.name) == (3, "inline")
        await asyncio.gather(*(manager.open(SOCKET) for _ in range(3)))
        with pytest.raises(RuntimeError, match="sessions are open"):
            manager.reconfigure(SessionLimits(sessions=4))


async def test_reconfiguring_checks_the_class_too() -> None:
    async with managing(Lonely, sessions=1) as manager:
        with pytest.raises(ConcurrencyConfigurationError):
            manager.reconfigure(SessionLimits(sessions=2))
        assert manager.max_sessions == 1


async def test_listeners_get_every_event_and_a_broken_one_does_no_harm(env: type[Env]) -> None:
    events: list[SessionEvent] = []

    def broken(event: SessionEvent) -> None:
        raise RuntimeError("listener")

    async with managing(env, sessions=1) as manager:
        manager.listeners += [broken, events.append]
        session = await manager.open(SOCKET)
        session.close("done")
        await wait_until_async(lambda: len(events) == 3)
    assert [(event.name, event.reason) for event in events] == [("opened", None), ("ready", None), ("closed", "done")]
    assert {event.session_id for event in events} == {session.id}


async def test_a_runner_of_ones_own_is_taken_as_it_is(env: type[Env]) -> None:
    runner = InlineRunner()
    async with managing(env, sessions=1, runner=runner) as manager:
        assert manager.runner is runner
        session = await manager.open(SOCKET)
        assert await session.run(CALL, lambda _: threading.get_ident()) == threading.get_ident()


async def test_under_a_storm_of_openings_and_cancellations_no_slot_is_lost(env: type[Env]) -> None:
    async with managing(env, sessions=3) as manager:

        async def visit(number: int) -> None:
            try:
                session = await manager.open(SOCKET)
            except SessionCapacityError:
                return
            await session.run(CALL, lambda _: None)
            session.close()

        tasks = [asyncio.ensure_future(visit(i)) for i in range(200)]
        for task in tasks[::7]:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await wait_until_async(lambda: manager.active == 0)
        await wait_until_async(lambda: env.alive == 0)
        assert env.most <= 3


async def test_a_resumable_session_is_detached_while_no_connection_holds_it(env: type[Env]) -> None:
    async with managing(env, sessions=2) as manager:
        session = await manager.open(SessionKind.RESUMABLE)
        first, second = Connection(), Connection()
        assert session.state is SessionState.DETACHED
        session.attach(first)
        assert session.state is SessionState.READY
        manager.attachments.reattach(session, second)
        assert first.reasons == ["another connection has attached to it"]
        manager.attachments.release(session, first)  # which does not hold it any more
        assert session.state is SessionState.READY
        manager.attachments.release(session, second)
        assert session.state is SessionState.DETACHED
        assert await session.run(CALL, lambda _: session.state) is SessionState.BUSY
        assert session.state is SessionState.DETACHED
        session.attach(second)
        session.close("closed by the client")
        await wait_until_async(lambda: session.state is SessionState.CLOSED)
        assert second.reasons == ["closed"]
        assert session.holder is None


async def test_a_session_whose_connection_goes_during_a_call_is_busy_and_then_detached(env: type[Env]) -> None:
    gate = threading.Event()
    async with managing(env, sessions=2) as manager:
        session, connection = await manager.open(SessionKind.RESUMABLE), Connection()
        session.attach(connection)
        work = asyncio.ensure_future(session.run(CALL, lambda _: gate.wait(30)))
        await asyncio.sleep(0)
        session.detach(connection)
        assert (session.state, session.is_detached) == (SessionState.BUSY, True)
        gate.set()
        assert await work
        assert (session.state, session.is_detached) == (SessionState.DETACHED, True)


async def test_a_session_can_be_closed_once_its_connection_detaches(env: type[Env]) -> None:
    async with managing(env, sessions=2) as manager:
        held, free = await manager.open(HTTP), await manager.open(HTTP)
        connection = Connection()
        held.attach(connection)
        assert not held.close_when_detached("closed by the client")
        assert free.close_when_detached("closed by the client")
        assert (held.is_ending, free.is_ending) == (False, True)
        held.detach(connection)
        assert held.is_ending
