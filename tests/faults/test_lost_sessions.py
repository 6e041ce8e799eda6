"""Clients when things go wrong: a lost episode is said so until `reset`, and replies belong to their requests."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from openenv.client.network import ConnectionOptions, parse_ws_url
from openenv.client.websocket import BlockingConnection
from openenv.core import GenericEnvClient
from openenv.errors import (
    ConnectFailed,
    EnvironmentFactoryError,
    ExecutionError,
    RequestTimeout,
    SessionCapacityError,
    SessionLost,
)
from servers import PlainAsgi, Serve
from waiting import holds_for, holds_for_async

Wait = Callable[..., None]
Hurry = Callable[..., AbstractContextManager[None]]

COUNTER = """
import os
import time
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Wait(Action):
    sleep_s: float = 0.0


class Count(Observation):
    count: int = 0


class CounterEnv(Environment[Wait, Count, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Count:
        self.count = 0
        return Count()

    def step(self, action: Wait, timeout_s: float | None = None, **kwargs: Any) -> Count:
        time.sleep(action.sleep_s)
        self.count += 1
        return Count(count=self.count)

    @property
    def state(self) -> State:
        return State(step_count=self.count)
"""


# -- timeouts -----------------------------------------------------------------------------------------------------


def test_a_step_that_timed_out_loses_the_episode_for_a_blocking_client(
    serve: Serve, probe: Any, in_a_hurry: Hurry
) -> None:
    """W26: the next step raises instead of running on a fresh environment; `reset` begins a new episode."""
    server = serve(probe.app(max_concurrent_envs=1))
    with GenericEnvClient(base_url=server.url) as client:
        client.reset()
        client.step({})
        probe.hold("step")
        with pytest.raises(RequestTimeout) as caught, in_a_hurry(client, 0.2):
            client.step({})
        assert isinstance(caught.value, TimeoutError)
        for _ in range(2):
            with pytest.raises(SessionLost, match="reset"):
                client.step({})
            with pytest.raises(SessionLost):
                client.state()
        assert probe.count("built") == 1
        probe.release("step")
        server.wait_for(lambda: server.manager.active == 0)
        client.reset()
        assert client.step({}).observation["count"] == 1


@pytest.mark.anyio
async def test_a_step_that_timed_out_loses_the_episode_for_an_awaiting_client(
    serve: Serve, probe: Any, in_a_hurry: Hurry
) -> None:
    """W26: the same with `await`."""
    server = serve(probe.app(max_concurrent_envs=1))
    async with GenericEnvClient(base_url=server.url) as client:
        await client.reset()
        await client.step({})
        probe.hold("step")
        with pytest.raises(RequestTimeout), in_a_hurry(client, 0.2):
            await client.step({})
        for _ in range(2):
            with pytest.raises(SessionLost, match="reset"):
                await client.step({})
        probe.release("step")
        assert probe.count("built") == 1
        await asyncio.to_thread(server.wait_for, lambda: server.manager.active == 0)
        await client.reset()
        assert (await client.step({})).observation["count"] == 1


# -- servers that die ---------------------------------------------------------------------------------------------


@pytest.mark.slow_but_for("v2")
@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_server_killed_in_mid_episode_is_a_lost_session_for_a_blocking_client(
    serve_process: Any, protocol: Any
) -> None:
    """W26: SIGKILL between two steps: typed errors until a reset, which another server on that port may answer."""
    server = serve_process(COUNTER)
    client = GenericEnvClient(base_url=server.url, protocol=protocol, reconnect_timeout_s=0.5).sync()
    client.reset()
    assert client.step({}).observation["count"] == 1
    server.kill()
    with pytest.raises(SessionLost) as caught:
        client.step({})
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(SessionLost):
        client.step({})
    with pytest.raises(ConnectFailed):
        client.reset()
    revived = serve_process(COUNTER, "--port", str(server.port))
    assert revived.port == server.port
    with pytest.raises(SessionLost):
        client.step({})
    client.reset()
    assert client.step({}).observation["count"] == 1
    client.close()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["v1", "v2"])
async def test_a_server_killed_during_a_step_is_a_lost_session_for_an_awaiting_client(
    serve_process: Any, protocol: Any
) -> None:
    """W26: SIGKILL while the client waits: it learns so at once and not by its timeout."""
    server = await asyncio.to_thread(serve_process, COUNTER)
    client = GenericEnvClient(base_url=server.url, message_timeout_s=60, protocol=protocol, reconnect_timeout_s=0.5)
    await client.reset()
    await client.step({})
    waiting = asyncio.ensure_future(client.step({"sleep_s": 30}))
    await holds_for_async(0.3, lambda: not waiting.done())
    began = time.monotonic()
    await asyncio.to_thread(server.kill)
    with pytest.raises(SessionLost):
        await waiting
    assert time.monotonic() - began < 30
    with pytest.raises(SessionLost):
        await client.step({})
    with pytest.raises(ConnectFailed):
        await client.reset()
    with pytest.raises(SessionLost):
        await client.state()
    await client.close()


def test_a_server_that_shuts_down_is_a_lost_session(serve_process: Any) -> None:
    """W26: an orderly shutdown is reported with the server's reason, and is no traceback on its side."""
    server = serve_process(COUNTER)
    with GenericEnvClient(base_url=server.url, reconnect_timeout_s=0.5) as client:
        client.reset()
        client.step({})
        assert server.stop() in (0, 130)
        with pytest.raises(SessionLost):
            client.step({})
    assert "Traceback" not in server.log


def test_a_reset_that_failed_does_not_revive_a_lost_episode(serve: Serve, probe: Any, in_a_hurry: Hurry) -> None:
    """W26: only a reset that worked begins an episode; a step after a failed one is not let through to a fresh one."""
    server = serve(probe.app(max_concurrent_envs=1))
    with GenericEnvClient(base_url=server.url) as client:
        client.reset()
        probe.hold("step")
        with pytest.raises(RequestTimeout), in_a_hurry(client, 0.2):
            client.step({})
        probe.release("step")
        server.wait_for(lambda: server.manager.active == 0)
        probe.fail["reset"] = RuntimeError("no level")
        with pytest.raises(ExecutionError):
            client.reset()
        with pytest.raises(SessionLost):
            client.step({})
        del probe.fail["reset"]
        client.reset()
        assert client.step({}).observation["count"] == 1


def test_a_refused_session_is_reported_by_its_own_error(serve: Serve, probe: Any) -> None:
    """W26, W15: a full server and a broken constructor have classes of their own, and the client can try again."""
    server = serve(probe.app(max_concurrent_envs=1))
    with GenericEnvClient(base_url=server.url) as first:
        first.reset()
        with GenericEnvClient(base_url=server.url) as second:
            with pytest.raises(SessionCapacityError) as full:
                second.reset()
            assert (full.value.active_sessions, full.value.max_sessions) == (1, 1)
            first.close()
            server.wait_for(lambda: server.manager.active == 0)
            probe.fail["construct"] = OSError("no display")
            with pytest.raises(EnvironmentFactoryError, match="FACTORY_ERROR") as broken:
                second.reset()
            assert "no display" in str(broken.value.reason)
            del probe.fail["construct"]
            server.wait_for(lambda: server.manager.active == 0)
            second.reset()
            assert second.step({}).observation["count"] == 1


def test_an_environment_that_raises_keeps_the_episode(serve: Serve, probe: Any) -> None:
    """W26: an ExecutionError is the environment's and does not lose the session."""
    with GenericEnvClient(base_url=serve(probe.app()).url) as client:
        client.reset()
        client.step({})
        with pytest.raises(ExecutionError, match="no such door"):
            client.step({"fail": "no such door"})
        assert client.step({}).observation["count"] == 2


# -- one request at a time ----------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_concurrent_awaits_on_one_client_get_their_own_replies(serve: Serve, probe: Any) -> None:
    """W27: fifty steps gathered on one client run one after the other, and each result is its own."""
    async with GenericEnvClient(base_url=serve(probe.app()).url) as client:
        await client.reset()
        results = await asyncio.gather(*(client.step({"number": number}) for number in range(50)))
        assert [result.observation["number"] for result in results] == list(range(50))
        assert [result.observation["count"] for result in results] == list(range(1, 51))


def test_threads_that_share_a_client_get_their_own_replies(serve: Serve, probe: Any) -> None:
    """W27: the same for threads."""
    with GenericEnvClient(base_url=serve(probe.app()).url) as client, ThreadPoolExecutor(8) as pool:
        client.reset()
        results = list(pool.map(lambda number: client.step({"number": number}), range(200)))
        assert [result.observation["number"] for result in results] == list(range(200))
        assert sorted(result.observation["count"] for result in results) == list(range(1, 201))


@pytest.mark.anyio
async def test_a_cancelled_step_loses_the_session_instead_of_its_reply(serve: Serve, probe: Any) -> None:
    """W27: the reply to a step that is no longer awaited is never taken for the next one's."""
    server = serve(probe.app(max_concurrent_envs=1))
    async with GenericEnvClient(base_url=server.url) as client:
        await client.reset()
        probe.hold("step")
        step = asyncio.ensure_future(client.step({"number": 1}))
        await asyncio.to_thread(probe.wait_entered, "step")
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        probe.release("step")
        with pytest.raises(SessionLost, match=r"interrupted|cancelled"):
            await client.step({"number": 2})
        await asyncio.to_thread(server.wait_for, lambda: server.manager.active == 0)
        await client.reset()
        assert (await client.step({"number": 3})).observation["number"] == 3


@pytest.mark.anyio
async def test_a_step_cancelled_in_the_queue_does_not_harm_others(serve: Serve, probe: Any) -> None:
    """W27: a request that was not sent yet can be cancelled without losing the one before it."""
    async with GenericEnvClient(base_url=serve(probe.app()).url) as client:
        await client.reset()
        probe.hold("step")
        first = asyncio.ensure_future(client.step({"number": 1}))
        await asyncio.to_thread(probe.wait_entered, "step")
        second = asyncio.ensure_future(client.step({"number": 2}))
        await holds_for_async(0.05, lambda: not second.done())
        second.cancel()
        probe.release("step")
        assert (await first).observation["number"] == 1
        assert (await client.step({"number": 3})).observation["count"] == 2


def test_an_interrupted_blocking_step_loses_the_session(serve: Serve, probe: Any) -> None:
    """W27: Ctrl-C between request and reply, then going on, does not pair replies wrongly."""
    with GenericEnvClient(base_url=serve(probe.app()).url) as client:
        client.reset()
        probe.hold("step")
        main = threading.get_ident()
        previous = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
                pool.submit(lambda: (probe.wait_entered("step"), signal.pthread_kill(main, signal.SIGUSR1)))
                client.step({"number": 1})
        finally:
            signal.signal(signal.SIGUSR1, previous)
        probe.release("step")
        with pytest.raises(SessionLost):
            client.step({"number": 2})
        client.reset()
        assert client.step({"number": 3}).observation["number"] == 3


# -- blocking without a loop --------------------------------------------------------------------------------------


def test_a_blocking_client_makes_no_loop_and_no_thread_per_client(serve: Serve, probe: Any) -> None:
    """W31: ten clients share one thread that answers pings, and need no event loop."""
    server = serve(probe.app(max_concurrent_envs=16))
    before = set(threading.enumerate())
    clients = [GenericEnvClient(base_url=server.url) for _ in range(10)]
    for client in clients:
        client.reset()
    mine = [thread for thread in threading.enumerate() if "client" in thread.name]
    assert len(mine) <= 1
    assert asyncio._get_running_loop() is None
    for client in clients:
        assert client.step({}).observation["count"] == 1
        client.close()
    assert len(set(threading.enumerate()) - before) <= 12


@pytest.mark.anyio
async def test_the_blocking_twin_works_inside_a_running_loop(serve: Serve, probe: Any) -> None:
    """W31: `.sync()` blocks and returns values where a loop runs, as in a notebook."""
    with GenericEnvClient(base_url=serve(probe.app()).url).sync() as client:
        assert client.reset().observation["count"] == 0
        assert client.step({"number": 4}).observation["number"] == 4
        assert client.state()["step_count"] == 1


@pytest.mark.anyio
async def test_reading_a_result_without_await_is_an_error_and_blocks_nothing(serve: Serve, probe: Any) -> None:
    """W31: inside a loop a call returns a coroutine and nothing that blocks when it is looked at."""
    client = GenericEnvClient(base_url=serve(probe.app()).url)
    pending: Any = client.reset()
    assert not hasattr(pending, "observation")
    assert (await pending).observation["count"] == 0
    await client.close()


class Helper(GenericEnvClient):
    """A client with methods of its own, both kinds."""

    async def twice(self) -> int:
        await self.step({})
        return (await self.step({})).observation["count"]  # type: ignore[no-any-return]

    def name(self) -> str:
        return "helper"


def test_helpers_of_a_client_work_on_its_blocking_twin(serve: Serve, probe: Any) -> None:
    """W31: coroutine helpers are run to their end, plain ones are just called."""
    with Helper(base_url=serve(probe.app()).url).sync() as client:
        client.reset()
        assert client.twice() == 2
        assert client.name() == "helper"


# -- idle clients -------------------------------------------------------------------------------------------------


def test_an_idle_blocking_connection_answers_the_servers_pings(serve: Serve, probe: Any) -> None:
    """W26: a trainer that thinks longer than the server's ping timeout keeps its session."""
    app = probe.app()
    app.add_middleware(PlainAsgi)  # uvicorn's own pings, which can be made quick
    server = serve(app, ws="websockets-sansio", ws_ping_interval=0.15, ws_ping_timeout=2.0)
    connection = BlockingConnection(parse_ws_url(f"ws://127.0.0.1:{server.port}/ws"), ConnectionOptions())
    connection.open()
    connection.exchange(b'{"type":"reset"}', 30)
    holds_for(2.5, lambda: connection.keep_alive() or connection.is_open)
    assert b'"count":1' in connection.exchange(b'{"type":"step","data":{}}', 30)
    connection.close()


def test_a_connection_that_answers_no_pings_is_dropped(serve: Serve, probe: Any) -> None:
    """W9: the other side of it: a peer that fell silent is found, and its session ends."""
    app = probe.app()
    app.add_middleware(PlainAsgi)
    server = serve(app, ws="websockets-sansio", ws_ping_interval=0.15, ws_ping_timeout=1.0)
    connection = BlockingConnection(parse_ws_url(f"ws://127.0.0.1:{server.port}/ws"), ConnectionOptions())
    connection.open()
    connection.exchange(b'{"type":"reset"}', 30)
    server.wait_for(lambda: server.manager.active == 0)
    connection.keep_alive()
    with pytest.raises(SessionLost):
        connection.exchange(b'{"type":"step","data":{}}', 5)


def test_keeping_alive_never_takes_a_reply(serve: Serve, probe: Any) -> None:
    """W26: tending an idle connection over and over leaves requests and replies alone."""
    server = serve(probe.app())
    options = ConnectionOptions(ping_interval_s=0.0, ping_timeout_s=30.0)
    connection = BlockingConnection(parse_ws_url(f"ws://127.0.0.1:{server.port}/ws"), options)
    connection.open()
    for number in range(10):
        connection.keep_alive()
        reply = connection.exchange(b'{"type":"step","data":{"number":%d}}' % number, 30)
        assert b'"number":%d' % number in reply
        connection.keep_alive()
    connection.close()


@pytest.mark.anyio
async def test_an_idle_awaiting_client_pings_and_is_answered(serve: Serve, probe: Any) -> None:
    """W26: with a short interval the client's own pings keep the connection known to be good."""
    server = serve(probe.app())
    options = {"websocket_ping_interval_s": 0.05, "websocket_ping_timeout_s": 20.0}
    async with GenericEnvClient(base_url=server.url, **options) as client:
        await client.reset()
        await holds_for_async(0.5, lambda: server.manager.active == 1)  # ten pings
        assert (await client.step({})).observation["count"] == 1
