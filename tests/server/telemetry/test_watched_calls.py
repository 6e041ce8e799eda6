"""Watched calls: none until the first request for metrics, then all of them, in sessions old and new."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import Any

import pytest

from environments import Idle
from openenv.errors import SessionClosedError
from openenv.server.runners import current_dispatcher
from openenv.server.sessions.manager import SessionLimits, SessionManager
from openenv.server.sessions.operations import CALL
from openenv.server.sessions.session import Session, SessionCall, SessionKind
from openenv.server.telemetry.server_metrics import ServerMetrics
from openenv.server.telemetry.watched_calls import CallWatch, WatchedCall

pytestmark = pytest.mark.anyio


def submit(session: Session) -> SessionCall:
    return session.submit(CALL, lambda env: None, lambda result, error: None, current_dispatcher())


async def test_calls_are_plain_until_the_first_reading_and_watched_from_then_on() -> None:
    manager = SessionManager(Idle, SessionLimits(sessions=4))
    watch = CallWatch(manager)
    metrics = ServerMetrics(manager, watch, info=dict)
    old = await manager.open(SessionKind.HTTP)
    assert type(submit(old)) is SessionCall
    metrics.text()
    new = await manager.open(SessionKind.HTTP)
    assert type(submit(old)) is WatchedCall
    assert type(submit(new)) is WatchedCall
    assert not manager.wants_origins
    await manager.drain()
    assert watch.times["call"].read()[0].observed == 2
    assert watch.times["construct"].read()[0].observed == 1


async def test_a_call_that_never_began_is_not_timed() -> None:
    manager = SessionManager(Idle, SessionLimits(sessions=1))
    watch = CallWatch(manager)
    watch.begin()
    session = await manager.open(SessionKind.HTTP)
    release = asyncio.Event()
    errors: list[Any] = []

    def block(env: Any) -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)

    loop = asyncio.get_running_loop()
    session.submit(CALL, block, lambda result, error: errors.append(error), current_dispatcher())
    session.submit(CALL, lambda env: None, lambda result, error: errors.append(error), current_dispatcher())
    session.close("enough")
    release.set()
    await manager.drain()
    assert sorted(type(error) for error in errors if error is not None) == [SessionClosedError]
    assert watch.times["call"].read()[0].observed == 1


async def test_a_surrounding_encloses_the_run_and_ends_before_the_answer() -> None:
    order: list[str] = []

    @contextmanager
    def surrounding(call: WatchedCall) -> Any:
        order.append("in")
        yield
        order.append("out")

    manager = SessionManager(Idle, SessionLimits(sessions=1))
    session = await manager.open(SessionKind.HTTP)
    CallWatch(manager).surround(surrounding)
    reply = asyncio.get_running_loop().create_future()

    def done(result: Any, error: BaseException | None) -> None:
        order.append("answer")
        reply.set_result(None)

    session.submit(CALL, lambda env: order.append("run"), done, current_dispatcher())
    await reply
    assert order == ["in", "run", "out", "answer"]
    assert manager.wants_origins
    await manager.drain()
