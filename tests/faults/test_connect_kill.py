"""Clients that vanish at any moment, by the hundred: the server is left with no session, task, thread, object or file
descriptor that it did not have before.

The server runs in a process of its own, as `openenv serve` runs it, and tells about itself on `/inside`.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import http_calls
from openenv.protocol.frames import masked_text_frame
from slow_steps import take
from waiting import wait_until

SOURCE = """
import asyncio
import gc
import random
import time
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
from openenv.server.sessions.session import Session

def a_moment() -> None:
    time.sleep(random.random() * 0.004)


BUILT = []
CLOSED = []


class Slowly(Environment[Action, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        a_moment()
        if BUILT and random.random() < 0.05:  # not the first one, without which the server does not start
            raise OSError("no luck today")
        BUILT.append(id(self))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        a_moment()
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        a_moment()
        if random.random() < 0.05:
            raise ValueError("no luck either")
        return Observation(reward=1.0, metadata={"text": "x" * random.choice([1, 1000, 100_000])})

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        CLOSED.append(id(self))
        if random.random() < 0.05:
            raise RuntimeError("not even that")


class SlowlyAsync(Slowly):
    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        await asyncio.sleep(random.random() * 0.004)
        return Observation()

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        await asyncio.sleep(random.choice([random.random() * 0.004, 30]))
        return Observation(reward=1.0)


app = create_app(
    ENV_CLASS,
    Action,
    Observation,
    concurrency_config=ConcurrencyConfig(max_concurrent_envs=128, session_timeout=0.3),
)


@app.get("/inside")
async def inside() -> dict[str, int]:
    gc.collect()
    manager = app.state.openenv_server.manager
    return {
        "active": manager.active,
        "once": len(manager.slots._once),
        "tasks": len(asyncio.all_tasks()),
        "runner_threads": manager.runner.threads,
        "sessions": sum(isinstance(found, Session) for found in gc.get_objects()),
        "built": len(BUILT),
        "closed": len(CLOSED),
    }
"""

POINTS = (
    "connect",
    "half a handshake",
    "construct",
    "reset",
    "half a frame",
    "step",
    "steps ahead",
    "unread reply",
    "after a step",
    "named http session",
    "plain http",
)
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
RESET = b'{"type":"reset"}'
STEP = b'{"type":"step","data":{}}'


@dataclass(frozen=True)
class Inside:
    """What a server process holds."""

    counts: dict[str, int]
    descriptors: int
    threads: int

    @classmethod
    def of(cls, server: Any) -> Inside:
        """Look into a server."""
        with http_calls.Client(base_url=server.url, trust_env=False, headers={"Connection": "close"}) as client:
            counts = client.get("/inside").json()
        take(0.02)  # for the connection of this very question
        proc = Path("/proc") / str(server.pid)
        return cls(counts, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")))

    @property
    def is_quiet(self) -> bool:
        """Whether no session is left, in use or in memory."""
        return not (self.counts["active"] or self.counts["once"] or self.counts["sessions"])


def when_quiet(server: Any, timeout_s: float = 20.0) -> Inside:
    """Wait until a server has no session left and its last connections, ours included, are gone."""
    looks = [Inside.of(server)]

    def is_quiet() -> bool:
        looks.append(Inside.of(server))
        return looks[-1].is_quiet and looks[-1] == looks[-2]

    wait_until(is_quiet, timeout_s, lambda: f"something is left: {looks[-1]}", every_s=0.1)
    return looks[-1]


def frame(payload: bytes) -> bytes:
    """A client's text frame."""
    return masked_text_frame(payload, b"\x01\x02\x03\x04")


def one_cycle(port: int, rng: random.Random) -> str:
    """Connect, go so far, vanish; return how far."""
    point = rng.choice(POINTS)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        if rng.random() < 0.5:  # a reset instead of an orderly end, when the socket is closed
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            go_to(sock, point, rng)
            if rng.random() < 0.5:
                take(rng.random() * 0.005)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server refused first: it was full, or the constructor raised
    return point


def go_to(sock: socket.socket, point: str, rng: random.Random) -> None:
    """Do what comes before the point."""
    if point == "connect":
        return
    if point.endswith(("http", "http session")):
        named = "X-OpenEnv-Session: new\r\n" if point == "named http session" else ""
        head = f"POST /reset HTTP/1.1\r\nHost: 127.0.0.1\r\n{named}Content-Length: 2\r\n\r\n"
        sock.sendall(head.encode() + (b"{}" if rng.random() < 0.8 else b"{"))
        return
    if point == "half a handshake":
        sock.sendall(HANDSHAKE[: rng.randrange(1, len(HANDSHAKE))])
        return
    sock.sendall(HANDSHAKE)
    sock.recv(4096)
    if point == "construct":
        return
    sock.sendall(frame(RESET))
    if point == "reset":
        return
    if point == "half a frame":
        whole = frame(STEP)
        sock.sendall(whole[: rng.randrange(1, len(whole))])
        return
    if point == "steps ahead":
        sock.sendall(frame(STEP) * rng.randrange(2, 30))
        return
    sock.recv(4096)
    sock.sendall(frame(STEP))
    if point == "unread reply":
        take(0.006)
    elif point == "after a step":
        sock.settimeout(0.05)
        try:
            sock.recv(4096)
        except TimeoutError:
            pass


def kill_cycles(server: Any, cycles: int, seed: int, workers: int = 4) -> Counter[str]:
    """Run cycles, several at a time, in an order that the seed decides for each worker."""

    def work(worker: int) -> Counter[str]:
        rng = random.Random(seed * 1000 + worker)
        return Counter(one_cycle(server.port, rng) for _ in range(cycles // workers))

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(work, range(workers)), Counter())


def check_nothing_is_left(server: Any, cycles: int, seed: int) -> None:
    """Warm up, look, run, look again."""
    kill_cycles(server, 48, seed=seed + 1)
    before = when_quiet(server)
    points = kill_cycles(server, cycles, seed=seed)
    after = when_quiet(server)
    assert set(points) == set(POINTS)
    assert after.counts["built"] == after.counts["closed"] > before.counts["built"]
    assert after.counts["tasks"] <= before.counts["tasks"]
    assert after.descriptors <= before.descriptors
    assert after.counts["runner_threads"] <= 8
    assert after.threads - after.counts["runner_threads"] <= before.threads - before.counts["runner_threads"]
    # and it still works
    with http_calls.Client(base_url=server.url, trust_env=False, headers={"Connection": "close"}) as client:
        answers = [client.post("/reset").status_code for _ in range(20)]
    assert 200 in answers
    assert set(answers) <= {200, 500}  # one constructor in twenty raises
    assert server.process.poll() is None


@pytest.mark.slow_but_for("SlowlyAsync")
@pytest.mark.parametrize("env_class", ["Slowly", "SlowlyAsync"])
def test_vanishing_clients_leave_nothing_behind(serve_process: Any, env_class: str) -> None:
    """W5, W9, W13: three hundred clients that vanish at random moments, over threads and over coroutines."""
    server = serve_process(SOURCE.replace("ENV_CLASS", env_class))
    check_nothing_is_left(server, cycles=300, seed=20)
    assert "a result could not be delivered" not in server.log
    assert "Task exception was never retrieved" not in server.log


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("env_class", ["Slowly", "SlowlyAsync"])
def test_thousands_of_vanishing_clients_leave_nothing_behind(serve_process: Any, env_class: str) -> None:
    """W5, W9, W13: five thousand each."""
    server = serve_process(SOURCE.replace("ENV_CLASS", env_class))
    check_nothing_is_left(server, cycles=5000, seed=7)
