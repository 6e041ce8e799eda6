"""Servers in threads of the test process, on free loopback ports, that start and stop without a pause."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

from openenv.server.fast import frame_socket
from openenv.server.run import ServeOptions, uvicorn_settings
from waiting import wait_until, wait_until_async

LOOK_S = 0.01
CLOSE_TIMEOUT_S = frame_socket.CLOSE_TIMEOUT_S


class PromptServer(uvicorn.Server):
    """Look every hundredth of a second where uvicorn looks every tenth: over thousands of servers that is minutes."""

    async def main_loop(self) -> None:
        looks = 0
        while not (self.should_exit if looks % 100 else await self.on_tick(0)):  # `on_tick` renews the date header
            looks += 1
            await asyncio.sleep(LOOK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in [*self.servers, *(sockets or [])]:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            await asyncio.wait_for(self._wait_tasks_to_complete(), self.config.timeout_graceful_shutdown)
        except asyncio.TimeoutError:
            for task in self.server_state.tasks:
                task.cancel(msg="Task cancelled, timeout graceful shutdown exceeded")
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _wait_tasks_to_complete(self) -> None:
        await asyncio.sleep(LOOK_S)
        state = self.server_state
        await wait_until_async(lambda: self.force_exit or not (state.connections or state.tasks), float("inf"))
        for server in self.servers:
            await server.wait_closed()


@dataclass
class RunningServer:
    """A server in a thread of this process."""

    url: str
    port: int
    app: Any
    server: uvicorn.Server

    @property
    def manager(self) -> Any:
        """The session manager behind the application."""
        return self.app.state.openenv_server.manager

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until a condition holds, or fail."""
        wait_until(condition, timeout_s)


Serve = Callable[..., RunningServer]
"""The fixtures `serve` and `serve_once`: an application, and settings of uvicorn."""


@contextlib.contextmanager
def running_server(app: Any, *, port: int = 0, **settings: Any) -> Iterator[RunningServer]:
    """Serve an application on a loopback port, by default a free one, as `openenv serve` does."""
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # or asyncio leaves Nagle's algorithm on
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    port = sock.getsockname()[1]
    options = uvicorn_settings(ServeOptions(port=port, log_level="warning", drain_s=5)) | settings
    server = PromptServer(uvicorn.Config(app, **options))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), name="test-server", daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield RunningServer(f"http://127.0.0.1:{port}", port, app, server)
    finally:
        frame_socket.CLOSE_TIMEOUT_S = 0.2  # the clients are gone: none of them answers a close frame
        server.should_exit = True
        thread.join(40)
        sock.close()
        frame_socket.CLOSE_TIMEOUT_S = CLOSE_TIMEOUT_S
        assert not thread.is_alive(), "the server did not stop"


class PlainAsgi:
    """Middleware between server and endpoint, as many applications have: the endpoint cannot take connections over."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.state = getattr(app, "state", None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def receive_through() -> Any:
            return await receive()

        await self._app(scope, receive_through, send)


@contextlib.contextmanager
def loops_by_uvloop() -> Iterator[None]:
    """New event loops are uvloop's, as under `openenv serve`."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
