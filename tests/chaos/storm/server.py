"""The server under test, in a thread: this package's as `openenv serve` runs it, the published one's by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from openenv.core.env_server.http_server import create_app

from .environment import Book, Inner, Move, Seen, counting

GRACE_S = 3.0
SESSIONS = 256
PING_S = 1.0


@dataclass
class Server:
    """A running server and the book of its environments."""

    port: int
    book: Book
    sessions: Callable[[], int]

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"


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
    sock = socket.socket(proto=socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    app, settings, prepare, sessions = (_published if package == "published" else _ours)(env_cls, book, port)
    server = uvicorn.Server(uvicorn.Config(app, **settings))

    async def serve() -> None:
        prepare()
        await server.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="chaos-server", daemon=True)
    thread.start()
    try:
        if not wait_until(lambda: server.started, 60):
            raise RuntimeError("the server did not start")
        book.built = book.closed = 0  # some build one to look at it
        yield Server(port, book, sessions)
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()


def _env_cls(package: str, book: Book, *, coroutine: bool) -> type[Any]:
    if package == "tools":
        from .tools import tool_counting  # the published package has no such thing

        return tool_counting(book, coroutine=coroutine)
    return counting(book, coroutine=coroutine)


def _ours(env_cls: type[Any], book: Book, port: int) -> Any:
    from openenv.server.app import new_application
    from openenv.server.compat import HTTPEnvServer
    from openenv.server.keepalive import KeepAlive
    from openenv.server.run import ServeOptions, uvicorn_settings
    from openenv.sessions.manager import SessionLimits

    limits = SessionLimits(sessions=SESSIONS, grace_s=GRACE_S, idle_s=4 * GRACE_S)
    server = HTTPEnvServer(env_cls, Move, Seen, state_cls=Inner, limits=limits)
    app = new_application()
    app.state.openenv_server = server
    server.register_routes(app)

    def prepare() -> None:
        from openenv.runners import loop_local

        loop = asyncio.get_running_loop()
        loop_local(loop, KeepAlive, lambda: KeepAlive(loop, interval_s=PING_S, timeout_s=PING_S))

    settings = uvicorn_settings(ServeOptions(port=port, log_level="error", drain_s=5))
    return app, settings, prepare, lambda: len(server.manager.sessions())


def _published(env_cls: type[Any], book: Book, port: int) -> Any:
    app = create_app(env_cls, Move, Seen, env_name="counting", max_concurrent_envs=SESSIONS, state_cls=Inner)
    settings = {"port": port, "log_level": "critical", "ws_ping_interval": PING_S, "ws_ping_timeout": PING_S}
    return app, settings, lambda: None, lambda: book.alive
