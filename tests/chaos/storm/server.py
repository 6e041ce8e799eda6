"""The server under test, in a thread: this package's as `openenv serve` runs it, the published one's by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from openenv.core.env_server.http_server import create_app

from .environment import Book, Deed, Inner, Move, Seen, counting

GRACE_S = 3.0
SESSIONS = 256
PING_S = 1.0


class Mishaps:
    """What happens to a server beside faults of its connections: nothing, unless a subclass knows better."""

    def player(self, player: Any, seed: int, owner: int) -> Any:
        """Return what plays an episode in place of a player: it may do harm meanwhile."""
        return player

    def begin(self, seed: int) -> None:
        """Take note that an episode begins."""

    def end(self, seed: int) -> list[str]:
        """Take note that an episode is over; say what has happened to its server meanwhile."""
        return []


@dataclass
class Server:
    """A running server and the book of its environments.

    Args:
        port: Where it listens.
        deeds: Reports what its environments did for one client.
        sessions: Tells how many sessions it has.
        alive: Tells how many environments have not been closed.
        mishaps: What else happens to it.
    """

    port: int
    deeds: Callable[[int], dict[str, list[Deed]]]
    sessions: Callable[[], int]
    alive: Callable[[], int]
    mishaps: Mishaps = field(default_factory=Mishaps)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left on it."""
        return not (self.sessions() or self.alive())


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; say whether it came true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextlib.contextmanager
def running(package: str, *, coroutine: bool) -> Iterator[Server]:
    """Serve the counting environment."""
    book = Book()
    env_cls = _env_cls(package, book, coroutine=coroutine)
    if package == "published":
        with serving(*_published(env_cls, book)) as (port, sessions):
            book.forget_trials()
            yield Server(port, book.deeds, sessions, lambda: book.alive)
    else:
        with serving(*ours(env_cls)) as (port, sessions):
            book.forget_trials()
            yield Server(port, book.deeds, sessions, lambda: book.alive)


@contextlib.contextmanager
def serving(
    app: Any, settings: dict[str, Any], prepare: Callable[[], None], sessions: Callable[[], int]
) -> Iterator[tuple[int, Callable[[], int]]]:
    """Run an application in a thread; gives its port and what counts its sessions."""
    sock = socket.socket(proto=socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, **settings))

    async def serve() -> None:
        prepare()
        await server.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="chaos-server", daemon=True)
    thread.start()
    try:
        if not wait_until(lambda: server.started, 60):
            raise RuntimeError("the server did not start")
        yield sock.getsockname()[1], sessions
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()


def _env_cls(package: str, book: Book, *, coroutine: bool) -> type[Any]:
    if package in ("tools", "mcp"):
        from .tools import tool_counting  # the published package has no such thing

        return tool_counting(book, coroutine=coroutine)
    return counting(book, coroutine=coroutine)


def ours(
    env: Any, *, slots: int = SESSIONS, idle_s: float | None = None, grace_s: float | None = None, **more: Any
) -> Any:
    """Prepare this package's server: the application, its settings, what is done first, and what counts sessions."""
    from openenv.server.app import HTTPEnvServer, new_application
    from openenv.server.fast.frame_socket import KeepAlive
    from openenv.server.run import ServeOptions, uvicorn_settings
    from openenv.server.sessions.manager import SessionLimits

    # Read now, not with the definition: tests shorten it.
    grace_s, idle_s = grace_s or GRACE_S, idle_s or 4 * GRACE_S
    limits = SessionLimits(sessions=slots, grace_s=grace_s, idle_s=idle_s)
    server = HTTPEnvServer(env, Move, Seen, state_cls=Inner, limits=limits, **more)
    app = new_application()
    app.state.openenv_server = server
    server.register_routes(app)

    def prepare() -> None:
        from openenv.server.runners import loop_local

        loop = asyncio.get_running_loop()
        loop_local(loop, KeepAlive, lambda: KeepAlive(loop, interval_s=PING_S, timeout_s=PING_S))

    settings = uvicorn_settings(ServeOptions(log_level="error", drain_s=5))
    return app, settings, prepare, lambda: len(server.manager.sessions())


def _published(env_cls: type[Any], book: Book) -> Any:
    app = create_app(env_cls, Move, Seen, env_name="counting", max_concurrent_envs=SESSIONS, state_cls=Inner)
    settings = {"log_level": "critical", "ws_ping_interval": PING_S, "ws_ping_timeout": PING_S}
    return app, settings, lambda: None, lambda: book.alive
