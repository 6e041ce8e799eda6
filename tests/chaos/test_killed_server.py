"""`kill -9` of a server under load: every client learns that its episode is lost, and none goes on in another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openenv.client.env_client import GenericEnvClient
from openenv.errors import SessionLost
from waiting import wait_until

CLIENTS = 50
MESSAGE_TIMEOUT_S = 45.0
SERVED = """
import os
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

BOOK = open(os.path.join(os.path.dirname(__file__), f"book.{os.getpid()}"), "a", buffering=1)

class Add(Action):
    client: int
    number: int

class Sum(Observation):
    count: int = 0
    client: int = -1

class Adder(Environment[Add, Sum, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count, self.client = 0, kwargs["client"]
        BOOK.write(f"reset {self.client}\\n")
        return Sum(client=self.client)

    def step(self, action, timeout_s=None, **kwargs):
        BOOK.write(f"step {action.client} {action.number}\\n")
        self.count += 1
        return Sum(count=self.count, client=self.client)

    @property
    def state(self):
        return State()
"""


@dataclass
class Loss:
    """How the episode of a client ended."""

    error: Exception
    afterwards: Exception | None
    steps: int
    seconds: float


class Load:
    """Clients that take steps until something happens; half of them await, half block."""

    def __init__(self, url: str, *, reconnect_timeout_s: float) -> None:
        self._options: dict[str, Any] = {
            "base_url": url,
            "message_timeout_s": MESSAGE_TIMEOUT_S,
            "reconnect_timeout_s": reconnect_timeout_s,
        }
        self._steps = [0] * CLIENTS
        self.killed_at = 0.0

    @property
    def is_flowing(self) -> bool:
        """Whether every client has taken steps."""
        return min(self._steps) > 3

    def start(self, pool: ThreadPoolExecutor) -> list[Future[Loss]]:
        """Let all clients loose."""
        blocking = [pool.submit(self._block, number) for number in range(CLIENTS // 2)]
        loop_thread: Future[list[Loss]] = pool.submit(asyncio.run, self._await_all())  # type: ignore[arg-type]
        return [*blocking, *(_nth(loop_thread, number) for number in range(CLIENTS - CLIENTS // 2))]

    def _block(self, number: int) -> Loss:
        client = GenericEnvClient(**self._options).sync()
        client.reset(client=number)
        try:
            while True:
                seen = client.step({"client": number, "number": self._steps[number]}).observation
                self._check(number, seen)
        except Exception as exc:
            error, seconds = exc, time.monotonic() - self.killed_at
        try:
            client.step({"client": number, "number": self._steps[number]})
        except Exception as exc:
            return Loss(error, exc, self._steps[number], seconds)
        finally:
            client.close()
        return Loss(error, None, self._steps[number], seconds)

    async def _await_all(self) -> list[Loss]:
        return list(await asyncio.gather(*(self._await(number) for number in range(CLIENTS // 2, CLIENTS))))

    async def _await(self, number: int) -> Loss:
        client = GenericEnvClient(**self._options)
        await client.reset(client=number)
        try:
            while True:
                seen = (await client.step({"client": number, "number": self._steps[number]})).observation
                self._check(number, seen)
        except Exception as exc:
            error, seconds = exc, time.monotonic() - self.killed_at
        try:
            await client.step({"client": number, "number": self._steps[number]})
        except Exception as exc:
            return Loss(error, exc, self._steps[number], seconds)
        finally:
            await client.close()
        return Loss(error, None, self._steps[number], seconds)

    def _check(self, number: int, seen: dict[str, Any]) -> None:
        self._steps[number] += 1
        assert (seen["client"], seen["count"]) == (number, self._steps[number])


def _nth(whole: Future[list[Loss]], number: int) -> Future[Loss]:
    part: Future[Loss] = Future()

    def pass_on(done: Future[list[Loss]]) -> None:
        if (error := done.exception()) is not None:
            part.set_exception(error)
        else:
            part.set_result(done.result()[number])

    whole.add_done_callback(pass_on)
    return part


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for the clients; all have ended when the test has."""
    before = set(threading.enumerate())
    with ThreadPoolExecutor(CLIENTS) as threads:
        yield threads
    wait_until(lambda: not set(threading.enumerate()) - before, 30, lambda: set(threading.enumerate()) - before)


def kill_under_load(server: Any, load: Load, pool: ThreadPoolExecutor) -> list[Future[Loss]]:
    """Let the clients loose and kill the server in the middle of it."""
    losses = load.start(pool)
    wait_until(lambda: load.is_flowing, 60, "the clients did not get going")
    load.killed_at = time.monotonic()
    server.kill()
    return losses


def test_every_client_learns_that_its_episode_is_lost(start_server: Any, pool: ThreadPoolExecutor) -> None:
    server = start_server(SERVED, "--max-sessions", str(CLIENTS))
    load = Load(server.url, reconnect_timeout_s=2.0)
    losses = [loss.result(60) for loss in kill_under_load(server, load, pool)]
    assert {type(loss.error) for loss in losses} == {SessionLost}, [loss.error for loss in losses]
    assert {type(loss.afterwards) for loss in losses} == {SessionLost}
    assert max(loss.seconds for loss in losses) < MESSAGE_TIMEOUT_S


@pytest.mark.slow
def test_a_server_that_comes_back_says_that_it_was_restarted(
    start_server: Any, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    server = start_server(SERVED, "--max-sessions", str(CLIENTS))
    load = Load(server.url, reconnect_timeout_s=60.0)
    losses = kill_under_load(server, load, pool)
    again = start_server(SERVED, "--max-sessions", str(CLIENTS), port=server.port)
    ends = [loss.result(60) for loss in losses]
    assert {getattr(end.error, "reason", str(end.error)) for end in ends} == {"server restarted"}
    assert {type(end.afterwards) for end in ends} == {SessionLost}
    assert (tmp_path / f"book.{again.process.pid}").read_text(encoding="utf-8") == ""  # not one step in a new episode
    booked = (tmp_path / f"book.{server.process.pid}").read_text(encoding="utf-8").splitlines()
    assert len(set(booked)) == len(booked)  # nor one twice in the old ones
    for number, end in enumerate(ends):
        ran = sum(line.startswith(f"step {number} ") for line in booked)
        assert ran - end.steps in (0, 1)
