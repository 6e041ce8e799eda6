"""Fixtures for all tests: real servers on free loopback ports, stopped when the test ends, and two interpreters.

One is that of the tests, the other has the published package, in a virtual environment of its own:
`OPENENV_PUBLISHED_PYTHON`, or `.bench/published`, which is made when it is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import openenv
from openenv.server.run import ServeOptions, uvicorn_settings

SOURCE = Path(openenv.__file__).resolve().parent.parent
PUBLISHED_VENV = Path(__file__).resolve().parents[1] / ".bench" / "published"
PUBLISHED_REQUIREMENTS = ["openenv==0.10.0", "uvloop", "httptools"]
IS_PUBLISHED = "from importlib.metadata import version; assert version('openenv') == '0.10.0'"
NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OPENENV_MODE", "ENABLE_WEB_INTERFACE"}


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


@pytest.fixture(scope="session")
def serve_once() -> Iterator[Callable[..., RunningServer]]:
    """Start servers that tests share; all are stopped at the very end."""
    with contextlib.ExitStack() as stack:
        yield lambda app, **settings: stack.enter_context(running_server(app, **settings))


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


@dataclass(frozen=True)
class Interpreter:
    """A Python with one of the two packages in it."""

    name: str
    python: str
    source: Path | None = None

    def environment(self, folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """What its processes inherit: a folder of test code on the path, and our source where it is ours."""
        path = [str(folder)] if self.source is None else [str(self.source), str(folder)]
        inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        return {**inherited, "PYTHONPATH": os.pathsep.join(path), **(extra or {})}


@pytest.fixture(scope="session")
def ours() -> Interpreter:
    """The interpreter that runs these tests."""
    return Interpreter("ours", sys.executable, SOURCE)


@pytest.fixture(scope="session")
def published() -> Interpreter:
    """An interpreter with the published package."""
    given = os.environ.get("OPENENV_PUBLISHED_PYTHON")
    if given:
        return Interpreter("published", given)
    python = PUBLISHED_VENV / "bin" / "python"
    PUBLISHED_VENV.parent.mkdir(exist_ok=True)
    with (PUBLISHED_VENV.parent / "published.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers may come here at once
        if not _has_published(python):
            _install_published(python)
    return Interpreter("published", str(python))


def _has_published(python: Path) -> bool:
    return python.exists() and subprocess.run([str(python), "-c", IS_PUBLISHED], check=False).returncode == 0


def _install_published(python: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(PUBLISHED_VENV)], check=True, env=environment)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PUBLISHED_REQUIREMENTS], check=True, env=environment)
    (PUBLISHED_VENV / "complete").touch()
