"""Clients of v2 on connections that break: the episode goes on as if nothing had happened, and no step runs twice.

The proxy of `conftest` cuts connections after a given number of bytes in either direction, says everything twice, or
falls silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.errors import (
    ConnectFailed,
    ExecutionError,
    ProtocolError,
    RequestTimeout,
    SessionCapacityError,
    SessionLost,
)

STEPS = 3


class Player:
    """Plays with either kind of client."""

    def __init__(self, url: str, *, blocking: bool, **options: Any) -> None:
        self.client = GenericEnvClient(url, **options)
        self._loop = None if blocking else asyncio.new_event_loop()

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._loop is None:
            return getattr(self.client, method)(*args, **kwargs)

        async def call() -> Any:
            return await getattr(self.client, method)(*args, **kwargs)

        return self._loop.run_until_complete(call())

    def play(self) -> list[Any]:
        """Play an episode and return what was seen."""
        seen = [self("reset", seed=7).observation]
        seen += [self("step", {"number": number}).observation for number in range(STEPS)]
        return [*seen, self("state")["step_count"]]

    def end(self) -> None:
        self("close")
        if self._loop is not None:
            self._loop.close()


@pytest.fixture
def player() -> Iterator[Callable[..., Player]]:
    """Make players; all are ended with the test."""
    players: list[Player] = []

    def make(url: str, **options: Any) -> Player:
        players.append(Player(url, **options))
        return players[-1]

    yield make
    for one in players:
        one.end()


both = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])


# -- cuts ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_cut_at_any_byte_changes_nothing(start: Any, proxy_to: Any, env_cls: Any, way: str, blocking: bool) -> None:
    """Before a request is sent, in the middle of it, after it, in the middle of its reply, after that."""
    server = start(sessions=64, grace_s=1.0)
    proxy = proxy_to(server)
    healthy = Player(proxy.url, blocking=blocking)
    healthy("connect")
    proxy.count()
    expected = healthy.play()
    total = proxy.passed[way]
    healthy.end()
    assert [one["count"] for one in expected[:-1]] == [0, 1, 2, 3]
    for cut in range(1, total, 1 + total // 40):
        env_cls.ran.clear()
        one = Player(proxy.url, blocking=blocking, reconnect_timeout_s=20)
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
def test_a_reply_to_a_step_that_ran_while_nobody_was_there_is_kept(
    start: Any, proxy_to: Any, player: Any, env_cls: Any, blocking: bool
) -> None:
    proxy = proxy_to(start())
    one = player(proxy.url, blocking=blocking)
    one("reset")
    cutter = threading.Timer(0.2, proxy.cut)
    cutter.start()
    assert one("step", {"number": 1, "sleep_s": 0.6}).observation["count"] == 1
    assert env_cls.ran == [1]
    assert proxy.connections == 2
    cutter.join()


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
    assert 0.2 < time.monotonic() - began < 5
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


def test_a_first_connection_that_fails_is_not_retried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(ConnectFailed):
        GenericEnvClient(f"http://127.0.0.1:{port}").sync().reset()
    assert time.monotonic() - began < 5


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


# -- sessions that are gone ---------------------------------------------------------------------------------------


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


# -- giving up ----------------------------------------------------------------------------------------------------


@both
def test_a_timeout_gives_the_session_up_and_frees_its_slot(start: Any, player: Any, blocking: bool) -> None:
    server = start(sessions=1)
    one = player(server.url, blocking=blocking, message_timeout_s=0.2)
    one("reset")
    with pytest.raises(RequestTimeout):
        one("step", {"sleep_s": 0.6})
    with pytest.raises(SessionLost, match="timed out"):
        one("step", {})
    server.wait_for(lambda: server.manager.active == 0)
    one("reset")
    assert one("step", {}).observation["count"] == 1


def test_a_cancelled_step_gives_the_session_up_and_frees_its_slot(start: Any) -> None:
    server = start(sessions=1)

    async def main() -> None:
        async with GenericEnvClient(server.url) as client:
            await client.reset()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.step({"sleep_s": 0.5}), 0.1)
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
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
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
    patient = player(server.url, blocking=blocking, wait_s=20, message_timeout_s=0.3)
    leaving = threading.Timer(1.0, holder, ("close",))
    leaving.start()
    assert patient("reset").observation["count"] == 0
    leaving.join()
    impatient = player(server.url, blocking=blocking, wait_s=0.1)
    with pytest.raises(SessionCapacityError):
        impatient("reset")


# -- keywords -----------------------------------------------------------------------------------------------------


@both
def test_keywords_of_a_step_reach_the_environment(start: Any, player: Any, blocking: bool) -> None:
    one = player(start().url, blocking=blocking)
    one("reset")
    result = one("step", {}, timeout_s=2.5, hint="left")
    assert result.metadata == {"timeout_s": 2.5, "hint": "left"}


@both
def test_a_step_that_may_take_longer_is_waited_for_longer(start: Any, player: Any, blocking: bool) -> None:
    one = player(start().url, blocking=blocking, message_timeout_s=0.2)
    one("reset")
    assert one("step", {"sleep_s": 0.5}, timeout_s=5).observation["count"] == 1


def test_v1_servers_do_not_get_keywords_of_a_step(start: Any) -> None:
    with GenericEnvClient(start().url, protocol="v1").sync() as client:
        client.reset()
        assert client.step({}, timeout_s=2.5, hint="left").metadata is None
        assert client.resume_token is None


# -- elsewhere ----------------------------------------------------------------------------------------------------


@both
def test_another_client_continues_the_episode_and_the_first_one_is_told(
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
def test_a_detached_session_waits_for_whoever_has_its_token(start: Any, player: Any, blocking: bool) -> None:
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


def test_a_wrong_token_is_a_lost_session_and_reset_begins_anew(start: Any) -> None:
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
        client._driver.tend()
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


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": "v3"},
        {"on_session_lost": "ignore"},
        {"reconnect_timeout_s": -1},
        {"reconnect_timeout_s": float("inf")},
        {"wait_s": -1},
        {"resume_token": "t", "protocol": "v1"},
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        GenericEnvClient("http://localhost:1", **options)


def test_children_have_the_options_of_their_parent(start: Any) -> None:
    class Narrow(GenericEnvClient):
        """A subclass whose constructor knows nothing of v2."""

        def __init__(self, base_url: str | None = None, **kwargs: Any) -> None:
            assert "protocol" not in kwargs
            super().__init__(base_url, **kwargs)

    parent = GenericEnvClient(start().url, protocol="v1", reconnect_timeout_s=3, on_session_lost="reset")
    child = parent.new_session()
    assert child._options.protocol == "v1"
    assert child._driver.reconnecting.timeout_s == 3
    assert child._on_session_lost == "reset"
    Narrow(parent.base_url).new_session()
