"""Clients and servers of v2 as processes: servers killed and restarted, episodes that move to another process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import openenv
from openenv import GenericEnvClient
from openenv.errors import SessionLost
from servers import Serve
from waiting import wait_until

SOURCE = str(Path(openenv.__file__).resolve().parents[1])

SERVED = """
import os
from typing import Any

from openenv import Action, Environment, Observation, State


class Move(Action):
    number: int = 0


class Seen(Observation):
    count: int = 0
    pid: int = 0


class Counter(Environment[Move, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.count = 0
        return Seen(pid=os.getpid())

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.count += 1
        return Seen(count=self.count, pid=os.getpid())

    @property
    def state(self) -> State:
        return State(step_count=self.count)
"""


class Served:
    """`openenv serve` in a process of its own, on a port that it can be started on again."""

    def __init__(self, folder: Path, port: int) -> None:
        self._file = folder / "counter.py"
        self._file.write_text(SERVED, encoding="utf-8")
        self.port = port
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "openenv", "serve", str(self._file), "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--max-sessions", "8"],
            cwd=self._file.parent,
            env={**os.environ, "PYTHONPATH": SOURCE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        process = self._process

        def listens() -> bool:
            assert process.poll() is None, "the server did not start"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(listens, 60, "the server did not start in time")

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


@pytest.fixture
def served(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Served]:
    """A server that has been started."""
    server = Served(tmp_path, free_port())
    server.start()
    yield server
    server.end()


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_client_of_a_killed_server_gets_a_lost_session_in_time(served: Served) -> None:
    """Nothing continues silently, whether a client waits for a reply or asks only later."""
    blocking = [GenericEnvClient(served.url, reconnect_timeout_s=0.5).sync() for _ in range(3)]
    for client in blocking:
        client.reset()
        assert client.step({}).observation["count"] == 1

    async def awaited() -> list[Any]:
        clients = [GenericEnvClient(served.url, reconnect_timeout_s=0.5) for _ in range(3)]
        for client in clients:
            await client.reset()
        await asyncio.to_thread(served.kill)
        return await asyncio.gather(*(client.step({}) for client in clients), return_exceptions=True)

    began = time.monotonic()
    outcomes = asyncio.run(awaited())
    for client in blocking:
        try:
            outcomes.append(client.step({}))
        except SessionLost as exc:
            outcomes.append(exc)
    assert time.monotonic() - began < 45  # and not the minute that a reply may take
    assert [type(outcome) for outcome in outcomes] == [SessionLost] * 6
    served.start()
    for client in blocking:
        with pytest.raises(SessionLost):
            client.step({})
        client.reset()
        assert client.step({}).observation["count"] == 1
        client.close()


@pytest.mark.slow
def test_a_restarted_server_is_the_reason_of_a_lost_session(served: Served) -> None:
    client = GenericEnvClient(served.url).sync()
    client.reset()
    client.step({})
    served.kill()
    served.start()
    for _ in range(2):
        with pytest.raises(SessionLost) as caught:
            client.step({})
        assert caught.value.reason == "server restarted"
    client.reset()
    assert client.step({}).observation["count"] == 1
    client.close()


def test_with_reset_as_the_policy_a_restarted_server_begins_a_marked_episode(served: Served) -> None:
    with GenericEnvClient(served.url, on_session_lost="reset").sync() as client:
        first = client.reset().observation["pid"]
        client.step({})
        served.kill()
        served.start()
        result = client.step({})
        assert result.metadata == {"session_lost": "server restarted"}
        assert result.observation["count"] == 0
        assert result.observation["pid"] != first


def test_another_process_continues_the_episode(served: Served) -> None:
    with GenericEnvClient(served.url).sync() as client:
        client.reset()
        client.step({})
        token = client.detach()
    script = (
        "import sys\n"
        "from openenv import GenericEnvClient\n"
        "client = GenericEnvClient(sys.argv[1], resume_token=sys.argv[2]).sync()\n"
        "print(client.step({}).observation['count'])\n"
        "client.detach()\n"
    )
    assert run(script, served.url, token) == "2"
    with GenericEnvClient(served.url, resume_token=token).sync() as client:
        assert client.step({}).observation["count"] == 3


def test_a_program_that_ends_ends_its_sessions_and_one_that_is_killed_leaves_them_for_a_while(
    serve: Serve, parrot_app: Callable[..., Any]
) -> None:
    server = serve(parrot_app())
    script = (
        "import os, sys\n"
        "from openenv import GenericEnvClient\n"
        "client = GenericEnvClient(sys.argv[1]).sync()\n"
        "client.reset()\n"
        "print(client.resume_token)\n"
        "sys.stdout.flush()\n"
    )
    run(script, server.url)
    server.wait_for(lambda: server.manager.active == 0)
    token = run(script + "os._exit(0)\n", server.url)
    assert server.manager.active == 1
    with GenericEnvClient(server.url, resume_token=token).sync() as client:
        assert client.step({"message": "still there"}).observation["text"] == "still there"


def test_a_forgotten_client_ends_its_session_without_the_help_of_the_collector(
    serve: Serve, parrot_app: Callable[..., Any]
) -> None:
    server = serve(parrot_app())
    gc.collect()
    gc.disable()
    try:
        client: Any = GenericEnvClient(server.url, protocol="v2").sync()
        client.reset()
        del client
        server.wait_for(lambda: server.manager.active == 0)
    finally:
        gc.enable()


def wait_until_gone(one: weakref.ref[Any]) -> None:
    """Wait: the thread that looks after connections may hold one for a moment."""
    wait_until(lambda: one() is None, 30, "it is kept alive")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["step", "reset"])
def test_an_error_of_a_server_out_of_reach_does_not_keep_a_forgotten_client_alive(served: Served, method: str) -> None:
    gc.collect()
    gc.disable()
    try:
        client: Any = GenericEnvClient(served.url, reconnect_timeout_s=0.1).sync()
        client.reset()
        served.kill()
        with contextlib.suppress(ConnectionError):
            getattr(client, method)(*([{}] if method == "step" else []))
        driver = weakref.ref(client._driver)
        del client
        wait_until_gone(driver)
    finally:
        gc.enable()
