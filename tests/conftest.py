"""Fixtures for all tests: real servers on free loopback ports, stopped when the test ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from openenv.server.run import ServeOptions, uvicorn_settings


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

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until a condition holds, or fail."""
        wait_for(condition, timeout_s)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds, or fail."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true in time")
        time.sleep(0.005)


@contextlib.contextmanager
def running_server(app: Any, **settings: Any) -> Iterator[RunningServer]:
    """Serve an application on a free loopback port, as `openenv serve` does."""
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # or asyncio leaves Nagle's algorithm on
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    options = uvicorn_settings(ServeOptions(port=port, log_level="warning", drain_s=5)) | settings
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), name="test-server", daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield RunningServer(f"http://127.0.0.1:{port}", port, app, server)
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    """Start servers; all are stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda app, **settings: stack.enter_context(running_server(app, **settings))


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"
