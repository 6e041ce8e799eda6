"""What the client tests share: environments served on real sockets, and a proxy that breaks connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from environments import Heard, Parrot, Say
from openenv import GenericEnvClient
from openenv.env.environment import Environment
from openenv.protocol.frames import FrameReader, text_head
from openenv.server.app import HTTPEnvServer, create_app, new_application
from openenv.server.sessions.lifetime import SessionLimits
from openenv.types import Action, Observation, State
from servers import Serve
from slow_steps import take
from waiting import wait_until


@pytest.fixture
def gate() -> threading.Event:
    """Opens the steps that wait."""
    Parrot.gate.clear()
    return Parrot.gate


@pytest.fixture
def entered() -> threading.Event:
    """Says that a step waits."""
    Parrot.entered.clear()
    return Parrot.entered


@pytest.fixture
def parrot_app() -> Callable[..., Any]:
    """Build the application of the environment."""

    def build(sessions: int = 4, **kwargs: Any) -> Any:
        return create_app(Parrot, Say, Heard, max_concurrent_envs=sessions, **kwargs)

    return build


@pytest.fixture
def parrot(serve: Serve, parrot_app: Callable[..., Any]) -> Any:
    """A server of the environment, with four slots."""
    return serve(parrot_app())


# -- an environment that counts, and connections that break ----------------------------------------------------------


class Move(Action):
    number: int = 0
    sleep_s: float = 0.0


class Seen(Observation):
    count: int = 0
    number: int = 0
    seed: int | None = None


class CountingEnv(Environment[Move, Seen, State]):
    """Counts its steps; the class knows all that were ever run, and may do something at the beginning of each."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    ran: list[int]
    on_step: Callable[[], Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seed: int | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        if kwargs.get("fail"):
            raise RuntimeError("no level")
        self.count, self.seed = 0, seed
        return Seen(seed=seed)

    def step(self, action: Move, timeout_s: float | None = None, hint: str | None = None, **kwargs: Any) -> Seen:
        if self.on_step is not None:
            self.on_step()
        take(action.sleep_s)
        self.count += 1
        self.ran.append(action.number)
        metadata = {"timeout_s": timeout_s, "hint": hint} if timeout_s or hint else {}
        return Seen(count=self.count, number=action.number, seed=self.seed, metadata=metadata)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


@pytest.fixture
def env_cls() -> type[CountingEnv]:
    """The environment, with a list of its own."""
    return type("Counting", (CountingEnv,), {"ran": []})


@pytest.fixture
def start(serve: Serve, env_cls: type[CountingEnv]) -> Callable[..., Any]:
    """Serve the environment under limits."""

    def start(port: int = 0, **limits: Any) -> Any:
        server = HTTPEnvServer(env_cls, Move, Seen, limits=SessionLimits(**{"sessions": 2, **limits}))
        app = new_application()
        app.state.openenv_server = server
        server.register_routes(app)
        return serve(app, port=port)

    return start


class Proxy:
    """Passes bytes on, until a test stops it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.passed = {"up": 0, "down": 0}
        self.cut_after: tuple[str, int] | None = None
        self.stutters = False
        self.refuses = False
        self.is_silent = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._ended = False
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except (TimeoutError, OSError):
                continue
            if self.refuses:
                _reset(client)
                continue
            client.settimeout(None)
            server = socket.create_connection(("127.0.0.1", self._target))
            self.connections += 1
            self._pairs.append((client, server))
            for source, sink, way in ((client, server, "up"), (server, client, "down")):
                thread = threading.Thread(target=self._pass, args=(source, sink, way), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        twice = Twice() if self.stutters and way == "down" else None
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                wait_until(lambda: self._ended or not self.is_silent, float("inf"))
                if self._cuts(data, sink, way):
                    self.cut()
                    return
                sink.sendall(data if twice is None else twice.feed(data))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cuts(self, data: bytes, sink: socket.socket, way: str) -> bool:
        plan = self.cut_after
        before = self.passed[way]
        self.passed[way] += len(data)
        if plan is None or plan[0] != way or self.passed[way] <= plan[1]:
            return False
        self.cut_after = None  # once
        sink.sendall(data[: plan[1] - before])
        return True

    def cut(self) -> None:
        """Break every connection, without a word."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)

    def count(self) -> None:
        """Count bytes from now on."""
        self.passed = {"up": 0, "down": 0}

    def end(self) -> None:
        self._ended = True
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)


class Twice:
    """Says every message of a server twice, the head of the connection once."""

    def __init__(self) -> None:
        self._head = b""
        self._reader = FrameReader(1 << 24, masked=False)
        self._has_begun = False

    def feed(self, data: bytes) -> bytes:
        if self._has_begun:
            return self._twice(data)
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._has_begun = True
        return head + end + (self._twice(rest) if rest else b"")

    def _twice(self, data: bytes) -> bytes:
        return b"".join(2 * (text_head(len(one.payload)) + one.payload) for one in self._reader.feed(data))


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@pytest.fixture
def proxy_to() -> Iterator[Callable[[Any], Proxy]]:
    """Put proxies before servers."""
    proxies: list[Proxy] = []

    def make(server: Any) -> Proxy:
        proxies.append(Proxy(server.port))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.end()


# -- either kind of client --------------------------------------------------------------------------------------------


STEPS = 3


class Player:
    """Plays with either kind of client."""

    def __init__(self, url: str, *, blocking: bool, **options: Any) -> None:
        self.client = GenericEnvClient(url, **options)
        self._loop = None if blocking else asyncio.new_event_loop()
        self._is_ended = False

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
        """Close the client, once."""
        if self._is_ended:
            return
        self._is_ended = True
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
