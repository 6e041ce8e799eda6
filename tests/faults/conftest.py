"""Fixtures for fault tests: an environment that can be held up and watched, raw peers that can vanish, servers that
can be killed."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

import openenv
from openenv.client.network import ConnectionOptions, parse_ws_url
from openenv.client.websocket import Handshake
from openenv.core.env_server.http_server import create_app
from openenv.env.environment import Environment
from openenv.protocol.frames import FrameReader, Opcode, masked_control_frame, masked_text_frame
from openenv.types import Action, Observation, State
from servers import Serve
from slow_steps import take, take_async
from waiting import comes_true, wait_until

_SOURCES = str(Path(openenv.__path__[0]).parent)


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Wait until a condition holds, or fail."""
    return wait_until


# -- an environment under observation -----------------------------------------------------------------------------


class Move(Action):
    """An action: sleep a while, then perhaps fail."""

    number: int = 0
    sleep_s: float = 0.0
    fail: str | None = None


class Seen(Observation):
    """What a move led to."""

    count: int = 0
    number: int = 0


class Inner(State):
    """A state with a field of its own."""

    secret: int = 42


@dataclass
class Event:
    """Something that happened to an environment, and on which thread."""

    name: str
    env: int
    thread: int


@dataclass
class Probe:
    """Watches the environments of one application, and holds their calls up where a test wants."""

    events: list[Event] = field(default_factory=list)
    fail: dict[str, BaseException] = field(default_factory=dict)
    slow_s: dict[str, float] = field(default_factory=dict)
    _gates: dict[str, threading.Event] = field(default_factory=dict)
    _entered: dict[str, threading.Event] = field(default_factory=lambda: defaultdict(threading.Event))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: int = 0

    def next_number(self) -> int:
        """Number an environment."""
        with self._lock:
            self._numbers += 1
            return self._numbers

    def hold(self, name: str) -> None:
        """Let every call of that name wait until it is released."""
        self._entered[name].clear()
        self._gates[name] = threading.Event()

    def release(self, name: str) -> None:
        """Let calls of that name go on."""
        gate = self._gates.pop(name, None)
        if gate is not None:
            gate.set()

    def release_all(self) -> None:
        """Let everything go on."""
        for name in list(self._gates):
            self.release(name)

    def wait_entered(self, name: str) -> None:
        """Wait until a call of that name is under way."""
        assert self._entered[name].wait(30), f"{name} was not called"

    def note(self, name: str, env: int) -> None:
        """Record that something happened."""
        with self._lock:
            self.events.append(Event(name, env, threading.get_ident()))
        self._entered[name].set()

    def visit(self, name: str, env: int) -> None:
        """Record a call, then wait, sleep or fail as the test said."""
        self.note(name, env)
        gate = self._gates.get(name)
        if gate is not None:
            assert gate.wait(60), f"{name} was held up and never released"
        if name in self.slow_s:
            take(self.slow_s[name])
        if name in self.fail:
            raise self.fail[name]

    def count(self, name: str) -> int:
        """How often something happened."""
        with self._lock:
            return sum(event.name == name for event in self.events)

    def threads(self, env: int | None = None) -> set[int]:
        """The threads on which environments, or one of them, were called."""
        with self._lock:
            return {event.thread for event in self.events if env is None or event.env == env}

    @property
    def alive(self) -> int:
        """Environments that were built and not closed."""
        return self.count("built") - self.count("closed")

    def factory(self, env_cls: type[Any] | None = None) -> Callable[[], Any]:
        """A factory of watched environments."""
        return functools.partial(env_cls or ProbeEnv, self)

    def app(self, *, env_cls: type[Any] | None = None, **options: Any) -> Any:
        """An application that serves watched environments; several sessions unless said otherwise."""
        if "concurrency_config" not in options:
            options.setdefault("max_concurrent_envs", 8)
        return create_app(self.factory(env_cls), Move, Seen, **options)


class ProbeEnv(Environment[Move, Seen, Inner]):
    """A synchronous environment that counts its steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe
        self.number = probe.next_number()
        self.count = 0
        self.closed = False
        probe.visit("construct", self.number)
        probe.note("built", self.number)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.probe.visit("reset", self.number)
        self.count = 0
        return Seen(count=0)

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        assert not self.closed, "a step on a closed environment"
        self.probe.visit("step", self.number)
        if action.sleep_s:
            take(action.sleep_s)
        if action.fail is not None:
            raise RuntimeError(action.fail)
        self.count += 1
        metadata = {"timeout_s": timeout_s, **kwargs} if timeout_s is not None or kwargs else {}
        return Seen(count=self.count, number=action.number, reward=float(self.count), metadata=metadata)

    @property
    def state(self) -> Inner:
        self.probe.visit("state", self.number)
        return Inner(step_count=self.count)

    def close(self) -> None:
        self.closed = True
        try:
            self.probe.visit("close", self.number)
        finally:
            self.probe.note("closed", self.number)


class AsyncProbeEnv(ProbeEnv):
    """The same with coroutines; notes when one of them is cancelled."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        return self.reset()

    async def step_async(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.probe.note("step_async", self.number)
        try:
            await take_async(action.sleep_s)
        except asyncio.CancelledError:
            self.probe.note("cancelled", self.number)
            raise
        return self.step(action.model_copy(update={"sleep_s": 0.0}))


@pytest.fixture
def probe() -> Iterator[Probe]:
    """Something to watch environments with; whatever it holds up is released when the test ends."""
    watched = Probe()
    yield watched
    watched.release_all()


@pytest.fixture
def async_env_cls() -> type[Any]:
    """The watched environment with coroutines."""
    return AsyncProbeEnv


@dataclass
class Clock:
    """Tells a session manager the time, which passes when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still until it is moved."""
    return Clock()


# -- peers --------------------------------------------------------------------------------------------------------


class Peer:
    """A WebSocket client down to its bytes, which can also vanish without a word."""

    def __init__(self, port: int, path: str = "/ws") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader(1 << 30, masked=False)
        self._messages: list[Any] = []
        handshake = Handshake(parse_ws_url(f"ws://127.0.0.1:{port}{path}"), ConnectionOptions().headers)
        self.socket.sendall(handshake.request)
        while (rest := handshake.feed(self._read())) is None:
            pass
        if rest:
            self._messages += self._reader.feed(rest)

    def _read(self) -> bytes:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data

    def send(self, message: Any) -> None:
        """Send a text frame: text or bytes as they are, anything else as JSON."""
        if isinstance(message, str):
            message = message.encode()
        elif not isinstance(message, bytes):
            message = json.dumps(message).encode()
        self.socket.sendall(masked_text_frame(message, os.urandom(4)))

    def send_binary(self, payload: bytes) -> None:
        """Send a binary frame."""
        frame = bytearray(masked_text_frame(payload, os.urandom(4)))
        frame[0] = 0x80 | Opcode.BINARY
        self.socket.sendall(bytes(frame))

    def receive(self, timeout_s: float = 30.0) -> Any:
        """Return the next message as JSON; raise ConnectionError when the server has closed."""
        self.socket.settimeout(timeout_s)
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if message.opcode == Opcode.CLOSE:
                    raise ConnectionError(f"closed with code {int.from_bytes(message.payload[:2], 'big')}")
                if message.opcode == Opcode.TEXT:
                    return json.loads(message.payload)
                if message.opcode == Opcode.PING:
                    self.socket.sendall(masked_control_frame(Opcode.PONG, message.payload, os.urandom(4)))
            self._messages += self._reader.feed(self._read())

    def ask(self, message: Any, timeout_s: float = 30.0) -> Any:
        """Send and receive."""
        self.send(message)
        return self.receive(timeout_s)

    def step(self, **fields: Any) -> Any:
        """Take a step."""
        return self.ask({"type": "step", "data": fields})

    def reset(self) -> Any:
        """Begin an episode."""
        return self.ask({"type": "reset"})

    def vanish(self, *, hard: bool = True) -> None:
        """Go away without a closing handshake; `hard` also drops what was sent (a reset instead of an end)."""
        if hard:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@pytest.fixture
def peer(serve: Serve) -> Iterator[Callable[..., Peer]]:
    """Connect raw peers; all are gone when the test ends, before its servers stop."""
    peers: list[Peer] = []

    def connect(port: int, path: str = "/ws") -> Peer:
        peers.append(Peer(port, path))
        return peers[-1]

    yield connect
    for one in peers:
        one.socket.close()


@pytest.fixture
def http(serve: Serve) -> Iterator[Callable[..., httpx2.Client]]:
    """Open plain HTTP clients; they keep cookies."""
    clients: list[httpx2.Client] = []

    def connect(url: str, **options: Any) -> httpx2.Client:
        clients.append(httpx2.Client(base_url=url, trust_env=False, timeout=30, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


# -- servers of their own -----------------------------------------------------------------------------------------


class ServerProcess:
    """`openenv serve` in a process of its own."""

    def __init__(self, folder: Path, source: str, *options: str, env: dict[str, str] | None = None) -> None:
        self._file = folder / "served_env.py"
        self._file.write_text(source, encoding="utf-8")
        self._log = folder / "server.log"
        command = [sys.executable, "-m", "openenv", "serve", str(self._file), "--port", "0", *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": _SOURCES, "COLUMNS": "200", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.port = self._find_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def _find_port(self) -> int:
        def has_address() -> re.Match[str] | bool | None:
            return self.process.poll() is not None or re.search(r"ws://127\.0\.0\.1:(\d+)/ws", self.log)

        address = comes_true(has_address, 60) and re.search(r"ws://127\.0\.0\.1:(\d+)/ws", self.log)
        if address:
            return int(address.group(1))
        self.stop()
        raise AssertionError(f"the server did not start:\n{self.log}")

    @property
    def log(self) -> str:
        """What the server has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.process.pid

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> int:
        """End it as Ctrl-C does and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode


@pytest.fixture
def serve_process(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers in processes of their own; all are ended with the test."""
    servers: list[ServerProcess] = []

    def start(source: str, *options: str, env: dict[str, str] | None = None) -> ServerProcess:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        servers.append(ServerProcess(folder, source, *options, env=env))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., str]:
    """Run a program of its own and return what it prints."""

    def run(source: str, env: dict[str, str] | None = None) -> str:
        file = tmp_path / "program.py"
        file.write_text(source, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": _SOURCES, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
