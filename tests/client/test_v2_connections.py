"""Clients of v2 on connections that break, and sessions that go on elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.errors import (
    ProtocolError,
    SessionLost,
)

STEPS = 3
both = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])


# -- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_for("up-awaited", "down-blocking")
@both
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_cut_at_any_byte_changes_nothing(
    start: Any, proxy_to: Any, env_cls: Any, player: Any, way: str, blocking: bool
) -> None:
    """Before a request is sent, in the middle of it, after it, in the middle of its reply, after that."""
    server = start(sessions=64, grace_s=15.0)
    proxy = proxy_to(server)
    healthy = player(proxy.url, blocking=blocking)
    healthy("connect")
    proxy.count()
    expected = healthy.play()
    total = proxy.passed[way]
    healthy.end()
    assert [one["count"] for one in expected[:-1]] == [0, 1, 2, 3]
    for cut in range(1, total, 1 + total // 40):
        env_cls.ran.clear()
        one = player(proxy.url, blocking=blocking, reconnect_timeout_s=20)
        one("connect")
        proxy.count()
        proxy.cut_after = (way, cut)
        assert one.play() == expected, cut
        assert env_cls.ran == list(range(STEPS)), cut
        proxy.cut_after = None
        one.end()
    server.wait_for(lambda: server.manager.active == 0)


@both
def test_a_cut_between_two_requests_is_not_noticed(start: Any, proxy_to: Any, player: Any, blocking: bool) -> None:
    proxy = proxy_to(start())
    one = player(proxy.url, blocking=blocking)
    one("reset")
    token = one.client.resume_token
    for number in range(5):
        proxy.cut()
        assert one("step", {"number": number}).observation["count"] == number + 1
    assert proxy.connections == 6
    assert one.client.resume_token == token


@both
def test_a_reply_to_a_step_that_ran_while_no_client_was_connected_is_kept(
    start: Any, proxy_to: Any, player: Any, env_cls: Any, blocking: bool
) -> None:
    proxy = proxy_to(start())
    one = player(proxy.url, blocking=blocking)
    one("reset")
    env_cls.on_step = staticmethod(proxy.cut)
    assert one("step", {"number": 1, "sleep_s": 0.3}).observation["count"] == 1
    assert env_cls.ran == [1]
    assert proxy.connections == 2


@both
def test_messages_that_come_twice_are_taken_once(start: Any, proxy_to: Any, player: Any, blocking: bool) -> None:
    proxy = proxy_to(start())
    proxy.stutters = True
    one = player(proxy.url, blocking=blocking)
    for _ in range(3):
        seen = one.play()
        assert [found["number"] for found in seen[1:-1]] == list(range(STEPS))
    assert proxy.connections == 1


@both
def test_a_half_open_connection_is_found_out_and_replaced_in_mid_request(
    start: Any, proxy_to: Any, player: Any, env_cls: Any, blocking: bool
) -> None:
    proxy = proxy_to(start())
    pings = {"websocket_ping_interval_s": 0.2, "websocket_ping_timeout_s": 0.2}
    one = player(proxy.url, blocking=blocking, **pings)
    one("reset")
    proxy.is_silent = True
    speaker = threading.Timer(1.5, lambda: setattr(proxy, "is_silent", False))
    speaker.start()
    assert one("step", {"number": 4}).observation["count"] == 1
    assert env_cls.ran == [4]
    assert proxy.connections >= 2
    speaker.join()


@both
def test_a_server_out_of_reach_for_a_while_is_waited_for(
    start: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    proxy = proxy_to(start())
    one = player(proxy.url, blocking=blocking)
    one("reset")
    proxy.refuses = True
    proxy.cut()
    opener = threading.Timer(0.5, lambda: setattr(proxy, "refuses", False))
    opener.start()
    assert one("step", {}).observation["count"] == 1
    opener.join()


@both
def test_a_server_out_of_reach_for_too_long_is_a_lost_session(
    start: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    proxy = proxy_to(start())
    one = player(proxy.url, blocking=blocking, reconnect_timeout_s=0.3)
    one("reset")
    proxy.refuses = True
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(SessionLost, match=r"not resumed within 0\.3 s"):
        one("step", {})
    assert 0.2 < time.monotonic() - began < 30
    proxy.refuses = False
    with pytest.raises(SessionLost):
        one("step", {})
    assert one("reset", seed=3).observation["seed"] == 3
    assert one("step", {}).observation["count"] == 1


@both
def test_without_reconnecting_a_cut_is_a_lost_session_until_reset(
    start: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    proxy = proxy_to(start(sessions=1))  # the slot of the lost episode is used again
    one = player(proxy.url, blocking=blocking, reconnect_timeout_s=0)
    one("reset")
    one("step", {})
    proxy.cut()
    for _ in range(2):
        with pytest.raises(SessionLost):
            one("step", {})
    assert one("reset").observation["count"] == 0
    assert one("step", {}).observation["count"] == 1
    proxy.cut()
    assert one("reset").observation["count"] == 0


@both
def test_a_reply_over_the_limit_is_not_asked_for_again_and_again(
    start: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    proxy = proxy_to(start())
    one = player(proxy.url, blocking=blocking, max_message_size_mb=0.0002)
    with pytest.raises(SessionLost, match="max_message_size_mb"):
        one("reset")
        one("step", {}, hint="x" * 1000)
    assert proxy.connections == 1


# -- elsewhere --------------------------------------------------------------------------------------------------------


@both
def test_another_client_continues_the_episode_and_the_first_one_gets_an_error(
    start: Any, player: Any, blocking: bool
) -> None:
    server = start(sessions=1)
    one = player(server.url, blocking=blocking)
    one("reset", seed=2)
    one("step", {"number": 1})
    other = player(server.url, blocking=blocking, resume_token=one.client.resume_token)
    assert other("step", {"number": 2}).observation["count"] == 2
    for _ in range(2):
        with pytest.raises(SessionLost):
            one("step", {"number": 3})
    assert other("state")["step_count"] == 2
    one("close")
    assert other("step", {"number": 4}).observation["count"] == 3


@both
def test_a_detached_session_waits_for_a_client_with_its_token(start: Any, player: Any, blocking: bool) -> None:
    server = start(sessions=1)
    one = player(server.url, blocking=blocking)
    one("reset")
    one("step", {})
    token = one("detach")
    with pytest.raises(SessionLost, match="detached"):
        one("step", {})
    one("close")
    assert server.manager.active == 1
    other = player(server.url, blocking=blocking, resume_token=token)
    assert other("step", {}).observation["count"] == 2
    other("close")
    server.wait_for(lambda: server.manager.active == 0)
    third = player(server.url, blocking=blocking, resume_token=token)
    with pytest.raises(SessionLost) as caught:
        third("step", {})
    assert caught.value.reason == "closed"


def test_there_is_nothing_to_detach_before_the_first_request_or_on_v1(start: Any) -> None:
    url = start().url
    for protocol in ("v1", "v2"):
        with GenericEnvClient(url, protocol=protocol).sync() as client:  # type: ignore[arg-type]
            if protocol == "v1":
                client.reset()
            with pytest.raises(ProtocolError):
                client.detach()


def test_a_wrong_token_is_a_lost_session_and_reset_starts_over(start: Any) -> None:
    with GenericEnvClient(start().url, resume_token="b1.none.such").sync() as client:
        with pytest.raises(SessionLost):
            client.step({})
        client.reset()
        assert client.step({}).observation["count"] == 1


def test_a_session_is_resumed_on_the_next_event_loop(start: Any) -> None:
    client = GenericEnvClient(start().url)

    async def reset() -> None:
        await client.reset()

    async def step() -> Any:
        return (await client.step({})).observation["count"]

    asyncio.run(reset())
    assert asyncio.run(step()) == 1
    assert asyncio.run(step()) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_does_not_resume_the_session_of_its_parent(start: Any, proxy_to: Any) -> None:
    proxy = proxy_to(start())
    with GenericEnvClient(proxy.url).sync() as client:
        client.reset()
        proxy.cut()
        client._driver.keep_alive()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    client.step({})
                except SessionLost as exc:
                    code = 0 if "another process" in exc.reason and client.resume_token is None else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.step({}).observation["count"] == 1
