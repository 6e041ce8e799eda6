"""Fixtures for the tests of the process runner: environments that workers can import, and servers with such workers."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.server.app import create_app
from servers import Serve
from waiting import wait_until

SOON_S = 30.0


def load(name: str, path: Path) -> ModuleType:
    """Load a file under a name of its own, as `openenv serve FILE` does."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def envs() -> ModuleType:
    """The environments."""
    return load("process_runner_environments", Path(__file__).with_name("environments.py"))


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Wait until something is true, and return it."""
    return lambda condition: wait_until(condition, SOON_S)


@pytest.fixture
def perilous(serve: Serve, envs: ModuleType) -> Callable[..., Any]:
    """Serve an environment in worker processes."""

    def start(env: Any = None, *, sessions: int = 8, **options: Any) -> Any:
        options = {"runner": "process", "env_processes": 2, **options}
        return serve(create_app(env or envs.Perilous, envs.Do, envs.Saw, max_concurrent_envs=sessions, **options))

    return start


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    """Make blocking clients, which are closed when the test ends."""
    clients: list[Any] = []

    def new(server: Any, protocol: str = "v2") -> Any:
        client = GenericEnvClient(getattr(server, "url", server), protocol=protocol).sync()
        clients.append(client)
        return client

    yield new
    for client in clients:
        client.close()


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Say whether a process runs; a zombie does not."""

    def alive(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

    return alive


@pytest.fixture
def kill() -> Callable[[int], None]:
    """Kill a process as the kernel does when memory runs out."""
    return lambda pid: os.kill(pid, signal.SIGKILL)
