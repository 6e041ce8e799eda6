"""Clients of v2 whose session is gone, or is given up: typed errors, free slots, a new episode only by `reset`."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.errors import (
    ExecutionError,
    RequestTimeout,
    SessionCapacityError,
    SessionLost,
)
from waiting import holds_for

both = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])


# -- sessions that are gone -------------------------------------------------------------------------------------------


@both
def test_a_session_whose_grace_is_over_is_lost_with_the_servers_reason(
    start: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    server = start(grace_s=0.1)
    proxy = proxy_to(server)
    one = player(proxy.url, blocking=blocking)
    one("reset")
    proxy.refuses = True
    proxy.cut()
    server.wait_for(lambda: server.manager.active == 0)
    proxy.refuses = False
    for _ in range(2):
        with pytest.raises(SessionLost) as caught:
            one("step", {})
        assert caught.value.reason == "expired"
    assert one.client.resume_token is None
    assert one("reset").observation["count"] == 0
    assert one("step", {}).observation["count"] == 1


@both
def test_a_reset_after_the_session_is_gone_begins_a_new_one_without_a_word(
    start: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    server = start(grace_s=0.1)
    proxy = proxy_to(server)
    one = player(proxy.url, blocking=blocking)
    one("reset")
    proxy.refuses = True
    proxy.cut()
    server.wait_for(lambda: server.manager.active == 0)
    proxy.refuses = False
    assert one("reset", seed=5).observation["seed"] == 5
    assert one("step", {}).observation["count"] == 1


@both
def test_a_server_that_stops_says_so_and_a_reset_waits_for_its_successor(
    start: Any, player: Any, blocking: bool
) -> None:
    server = start()
    one = player(server.url, blocking=blocking)
    one("reset")
    server.server.should_exit = True
    server.wait_for(lambda: server.manager.active == 0)
    for _ in range(2):
        with pytest.raises(SessionLost) as caught:
            one("step", {})
        assert caught.value.reason == "server shutting down"
    with ThreadPoolExecutor(1) as others:
        begun = others.submit(one, "reset", seed=5)
        holds_for(2.5, lambda: not begun.done())  # longer than an address without a server is tried
        start(port=server.port)
        assert begun.result(30).observation["seed"] == 5


@both
def test_a_session_that_an_operator_has_closed_is_lost(start: Any, player: Any, blocking: bool) -> None:
    server = start()
    one = player(server.url, blocking=blocking, on_session_lost="raise")
    one("reset")
    for session in server.manager.sessions():
        server.manager.close(session.id) if hasattr(server.manager, "close") else session.close("closed")
    server.wait_for(lambda: server.manager.active == 0)
    with pytest.raises(SessionLost):
        one("step", {})


@both
def test_with_reset_as_the_policy_a_step_begins_a_new_episode_and_says_so(
    start: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    server = start(grace_s=0.1)
    proxy = proxy_to(server)
    one = player(proxy.url, blocking=blocking, on_session_lost="reset")
    one("reset", seed=11)
    one("step", {})
    proxy.refuses = True
    proxy.cut()
    server.wait_for(lambda: server.manager.active == 0)
    proxy.refuses = False
    marked = one("step", {"number": 9})
    assert marked.metadata == {"session_lost": "expired"}
    assert (marked.observation["seed"], marked.observation["count"], marked.observation["number"]) == (11, 0, 0)
    after = one("step", {"number": 1})
    assert "session_lost" not in (after.metadata or {})
    assert after.observation["count"] == 1


def test_with_reset_as_the_policy_a_state_still_says_that_the_episode_is_lost(start: Any, proxy_to: Any) -> None:
    """There is no result that could be marked."""
    server = start(grace_s=0.1)
    proxy = proxy_to(server)
    with GenericEnvClient(proxy.url, on_session_lost="reset").sync() as client:
        client.reset()
        proxy.refuses = True
        proxy.cut()
        server.wait_for(lambda: server.manager.active == 0)
        proxy.refuses = False
        with pytest.raises(SessionLost):
            client.state()
        assert client.step({}).metadata == {"session_lost": "expired"}
    with pytest.raises(SessionLost, match="closed by the client"):
        client.step({})


# -- giving up --------------------------------------------------------------------------------------------------------


@both
def test_a_timeout_gives_the_session_up_and_frees_its_slot(
    start: Any, player: Any, env_cls: Any, in_a_hurry: Any, blocking: bool
) -> None:
    server = start(sessions=1)
    one = player(server.url, blocking=blocking)
    one("reset")
    gate = threading.Event()
    env_cls.on_step = staticmethod(lambda: gate.wait(30))
    with pytest.raises(RequestTimeout), in_a_hurry(one.client, 0.2):
        one("step", {})
    gate.set()
    with pytest.raises(SessionLost, match="timed out"):
        one("step", {})
    server.wait_for(lambda: server.manager.active == 0)
    one("reset")
    assert one("step", {}).observation["count"] == 1


def test_a_cancelled_step_gives_the_session_up_and_frees_its_slot(start: Any, env_cls: Any) -> None:
    server = start(sessions=1)
    entered, gate = threading.Event(), threading.Event()
    env_cls.on_step = staticmethod(lambda: (entered.set(), gate.wait(30)))

    async def main() -> None:
        async with GenericEnvClient(server.url) as client:
            await client.reset()
            step = asyncio.ensure_future(client.step({}))
            assert await asyncio.to_thread(entered.wait, 30)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            gate.set()
            with pytest.raises(SessionLost, match="interrupted"):
                await client.step({})
            await asyncio.to_thread(server.wait_for, lambda: server.manager.active == 0)
            await client.reset()

    asyncio.run(main())


def test_an_interrupt_while_reconnecting_gives_up_only_what_was_sent(start: Any, proxy_to: Any) -> None:
    proxy = proxy_to(start())
    with GenericEnvClient(proxy.url).sync() as client:
        client.reset()
        proxy.refuses = True
        proxy.cut()
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                client.step({"number": 1})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        proxy.refuses = False
        if client.resume_token is not None:
            assert client.step({"number": 2}).observation["count"] == 1
        else:  # the step was written into a connection that was already dead, so it may have run
            with pytest.raises(SessionLost, match="interrupted"):
                client.step({"number": 2})


@both
def test_closing_ends_the_session_at_once(start: Any, player: Any, blocking: bool) -> None:
    server = start(sessions=1)
    one = player(server.url, blocking=blocking)
    one("reset")
    one("close")
    server.wait_for(lambda: server.manager.active == 0)
    with pytest.raises(SessionLost, match="closed by the client"):
        one("step", {})
    assert one.client.resume_token is None


def test_a_failed_reset_and_a_failed_open_leave_the_client_usable(start: Any) -> None:
    server = start(sessions=1)
    with GenericEnvClient(server.url).sync() as first, GenericEnvClient(server.url).sync() as second:
        with pytest.raises(ExecutionError, match="no level"):
            first.reset(fail=True)
        first.reset()
        with pytest.raises(SessionCapacityError):
            second.reset()
        first.close()
        server.wait_for(lambda: server.manager.active == 0)
        second.reset()
        assert second.step({}).observation["count"] == 1


@both
def test_a_client_may_wait_for_a_slot(start: Any, player: Any, blocking: bool) -> None:
    """Longer than for a reply: the queue has a limit of its own."""
    server = start(sessions=1)
    holder = player(server.url, blocking=True)
    holder("reset")
    patient = player(server.url, blocking=blocking, wait_s=30, message_timeout_s=1.2)
    leaving = threading.Timer(1.6, holder, ("close",))
    leaving.start()
    assert patient("reset").observation["count"] == 0
    leaving.join()
    impatient = player(server.url, blocking=blocking, wait_s=0.1)
    with pytest.raises(SessionCapacityError):
        impatient("reset")
