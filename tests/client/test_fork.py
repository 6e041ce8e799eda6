"""Clients in forked processes: the connection stays the parent's, the child says so and may start over."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from dict_client import DictHTTPClient
from openenv import GenericEnvClient
from openenv.client.driver import KEEPALIVE, KeepaliveThread
from openenv.errors import SessionLost

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def in_a_fork(work: Callable[[], Any]) -> None:
    """Run something in a forked process and fail if it fails there."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons do not like forks of threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    done = threading.Timer(30, os.kill, (pid, 9))
    done.start()
    _, status = os.waitpid(pid, 0)
    done.cancel()
    assert os.waitstatus_to_exitcode(status) == 0


def steps(client: Any, name: str) -> None:
    for i in range(20):
        assert client.step({"message": f"{name}{i}"}).observation["text"] == f"{name}{i}"


def test_a_fork_does_not_use_the_connection_of_its_parent_until_it_resets(parrot: Any) -> None:
    with GenericEnvClient(parrot.url).sync() as client:
        client.reset()

        def child() -> None:
            for use in (lambda: client.step({"message": "a"}), client.state):
                with pytest.raises(SessionLost, match="opened in another process"):
                    use()
            assert "opened in another process" in repr(client)
            client.reset()
            steps(client, "child")
            assert client.state()["step_count"] == 20
            client.close()

        client.step({"message": "first"})
        in_a_fork(child)
        steps(client, "parent")
        assert client.state()["step_count"] == 21


def test_closing_or_dropping_a_client_in_a_fork_leaves_the_session_of_the_parent(parrot: Any) -> None:
    client = GenericEnvClient(parrot.url)
    client.reset()
    twins = [client]

    def drop() -> None:
        nonlocal client
        twins.clear()
        del client

    in_a_fork(client.close)
    in_a_fork(drop)
    with client:
        steps(client, "parent")
        assert parrot.manager.active == 1


def test_an_awaited_client_is_left_to_its_loop_and_can_be_used_in_a_fork_after_reset(parrot: Any) -> None:
    async def main() -> None:
        async with GenericEnvClient(parrot.url) as client:
            await client.reset()
            in_a_fork(lambda: lost_then_anew(client))
            in_a_fork(lambda: asyncio.run(awaited(client)))
            in_a_fork(client.close)
            assert (await client.step({"message": "parent"})).observation["text"] == "parent"
            assert (await client.state())["step_count"] == 1

    def lost_then_anew(client: Any) -> None:
        with pytest.raises(SessionLost, match="opened in another process"):
            client.step({"message": "a"})
        client.reset()
        steps(client, "child")

    async def awaited(client: Any) -> None:
        with pytest.raises(SessionLost, match="opened in another process"):
            await client.step({"message": "a"})
        await client.reset()
        assert (await client.step({"message": "child"})).observation["text"] == "child"
        await client.close()

    asyncio.run(main())


def test_a_lock_that_was_held_at_the_fork_does_not_stop_the_child(parrot: Any) -> None:
    with GenericEnvClient(parrot.url).sync() as client:
        client.reset()

        def child() -> None:
            client.reset()
            client.close()

        with client._driver._thread_lock.here(), KEEPALIVE._lock.here():  # as other threads may at that moment
            in_a_fork(child)


class Helped(GenericEnvClient):
    async def in_a_thread(self) -> int:
        await self.step({"message": "a"})
        began = time.monotonic()
        answer = await asyncio.wait_for(asyncio.to_thread(lambda: 42), 20)
        assert time.monotonic() - began < 15, "the thread did not wake the loop, only the timer did"
        return answer


@pytest.mark.parametrize("used", [True, False], ids=["closed there", "dropped there"])
def test_helpers_of_the_parent_still_work_after_a_fork_has_let_go_of_their_loop(parrot: Any, used: bool) -> None:
    client = Helped(parrot.url).sync()
    client.reset()
    assert client.in_a_thread() == 42

    def drop() -> None:
        nonlocal client
        del client

    in_a_fork(client.close if used else drop)
    assert client.in_a_thread() == 42
    client.close()


class Tended:
    def __init__(self) -> None:
        self.tended = threading.Event()

    def keep_alive(self) -> None:
        self.tended.set()


def test_connections_of_a_fork_are_kept_alive_there() -> None:
    tender, ours, theirs = KeepaliveThread(period_s=0.01), Tended(), Tended()
    tender.add(ours)

    def child() -> None:
        ours.tended.clear()
        tender.add(theirs)
        assert theirs.tended.wait(10)
        assert not ours.tended.is_set()

    assert ours.tended.wait(10)
    in_a_fork(child)
    tender.discard(ours)


class Starter:
    def __init__(self, url: str) -> None:
        self.url = url
        self.stopped = False

    def start(self) -> str:
        return self.url

    def wait_for_ready(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True


def test_a_fork_does_not_stop_the_server_that_its_parent_has_started(parrot: Any) -> None:
    starter = Starter(parrot.url)
    client = GenericEnvClient(provider=starter).sync()
    client.reset()

    def child() -> None:
        client.close()
        assert not starter.stopped

    in_a_fork(child)
    client.close()
    assert starter.stopped


def test_an_http_client_keeps_to_its_process_too(parrot: Any) -> None:
    starter = Starter(parrot.url)
    with DictHTTPClient(parrot.url, provider=starter) as client:
        client.reset()

        def child() -> None:
            with pytest.raises(SessionLost, match="opened in another process"):
                client.step({"message": "a"})
            client.reset()
            steps(client, "child")
            client.close()
            assert not starter.stopped

        in_a_fork(child)
        in_a_fork(client.close)
        steps(client, "parent")
        assert client.state()["step_count"] == 20
