"""What the tests of `VectorEnv` share: an environment that counts every step it runs, and a proxy that cuts lines."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from openenv.env.environment import Environment
from openenv.server.app import create_app
from openenv.types import Action, Observation, State
from servers import Serve


class Move(Action):
    """Add a number; wait, end the episode or fail on request."""

    add: int = 0
    wait: str = ""
    end: bool = False
    limit: bool = False
    fail: bool = False


class Sum(Observation):
    """What was added up, in which environment, and from which seed on."""

    total: int = 0
    steps: int = 0
    env: int = 0
    seed: int | None = None
    word: str = ""


class Adder(Environment[Move, Sum, State]):
    """Adds up numbers."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    lock = threading.Lock()
    made = 0
    ran: ClassVar[Counter[str]] = Counter()
    gates: ClassVar[dict[str, threading.Event]] = {}

    def __init__(self) -> None:
        super().__init__()
        with self.lock:
            Adder.made += 1
            self.number = Adder.made
        self.seed: int | None = None
        self.total = self.steps = 0
        self.word = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Sum:
        if kwargs.get("fail"):
            raise RuntimeError("no beginning")
        self.seed, self.total, self.steps, self.word = seed, 0, 0, kwargs.get("word", "")
        self.ran["reset"] += 1
        return self._seen()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Sum:
        if action.fail:
            raise RuntimeError("no way")
        if action.wait:
            assert self.gates[action.wait].wait(20)
        self.steps += 1
        self.total += action.add
        self.ran["step"] += 1
        seen = self._seen()
        seen.reward = float(action.add)
        seen.done = action.end or action.limit
        if action.limit:
            seen.terminated, seen.truncated = False, True
        return seen

    def _seen(self) -> Sum:
        return Sum(total=self.total, steps=self.steps, env=self.number, seed=self.seed, word=self.word)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Gates(dict[str, threading.Event]):
    """Events by name, made when they are asked for."""

    def __missing__(self, name: str) -> threading.Event:
        return self.setdefault(name, threading.Event())


@pytest.fixture
def adder_cls() -> Iterator[type[Adder]]:
    """The environment, nothing counted yet."""
    Adder.ran = Counter()
    Adder.gates = Gates()
    yield Adder
    for gate in Adder.gates.values():
        gate.set()


@pytest.fixture
def adder(serve: Serve, adder_cls: type[Adder]) -> Any:
    """A server of the environment, with 64 slots."""
    return serve(create_app(adder_cls, Move, Sum, max_concurrent_envs=64))


class OldServer:
    """An application whose server speaks only protocol v1."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.state = app.state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass everything on but what the client offers to speak."""
        if scope["type"] == "websocket":
            headers = [pair for pair in scope["headers"] if pair[0] != b"sec-websocket-protocol"]
            scope = {**scope, "headers": headers, "subprotocols": []}
        await self.app(scope, receive, send)


@pytest.fixture
def old_server(serve: Serve) -> Callable[[Any], Any]:
    """Serve an application so that it speaks only protocol v1."""
    return lambda app: serve(OldServer(app))


@pytest.fixture
def old(old_server: Callable[[Any], Any], adder_cls: type[Adder]) -> Any:
    """A server of the environment that speaks only protocol v1, with 64 slots."""
    return old_server(create_app(adder_cls, Move, Sum, max_concurrent_envs=64))


class Proxy:
    """Forwards TCP to a port until a test changes that."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self.refusing = False
        self.swallowing = False
        """Whether what the server says goes nowhere, and the line is cut when it speaks."""
        self._lines: list[tuple[socket.socket, socket.socket]] = []
        self._deaf: set[int] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.refusing:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            with self._lock:
                self._lines.append((client, server))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, target, source is server), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_server and self.swallowing:
                    break
                if id(source) in self._deaf:
                    continue
                target.sendall(data)
        _end(source)
        _end(target)

    def half_open(self) -> None:
        """Leave the present lines open and deaf, as a machine does that was unplugged; new ones work."""
        with self._lock:
            self._deaf.update(id(end) for pair in self._lines for end in pair)

    def cut(self) -> int:
        """Cut every line; return how many there were."""
        with self._lock:
            lines, self._lines = self._lines, []
        for pair in lines:
            for end in pair:
                _end(end)
        return len(lines)

    def close(self) -> None:
        """Stop."""
        self._listener.close()
        self.cut()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@pytest.fixture
def proxied() -> Iterator[Callable[[int], Proxy]]:
    """Put proxies before ports."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(contextlib.closing(Proxy(port)))
