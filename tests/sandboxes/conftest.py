"""Fixtures for sandbox tests: real backends. What they need is installed where that is possible."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from openenv.sandboxes import DockerSandboxes, LocalSandboxes, ProcessSandboxes, Sandbox, SandboxSpec
from waiting import wait_until


@pytest.fixture(scope="session")
def process() -> ProcessSandboxes:
    """The backend without isolation."""
    return ProcessSandboxes(i_know_there_is_no_isolation=True)


@pytest.fixture
def open_local(local: LocalSandboxes) -> Iterator[Callable[..., Sandbox]]:
    """Open local sandboxes; all are closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda **spec: stack.enter_context(local.open(SandboxSpec(**spec)))


@pytest.fixture
def box(open_local: Callable[..., Sandbox]) -> Sandbox:
    """A local sandbox."""
    return open_local()


@pytest.fixture(scope="session")
def docker_host(docker_engines: Any) -> Iterator[str]:
    """The address of a Docker engine that these tests own; `make test` installs it where it can."""
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        yield host


@pytest.fixture(scope="session")
def docker(docker_host: str) -> DockerSandboxes:
    """The Docker backend, with the host's own system as its image."""
    return DockerSandboxes("host", engine="docker", host=docker_host)


def load(path: Path) -> Any:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def e2b_double(docker: DockerSandboxes) -> Iterator[Any]:
    """A double of E2B that listens at `url` and knows `key`; its sandboxes are containers."""
    pytest.importorskip("e2b")
    module = load(Path(__file__).with_name("e2b_double.py"))
    double = module.E2BDouble(docker)
    with serving(double.asgi()) as url:
        double.url, double.key = url, module.KEY
        yield double
        double.close()


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application on a free loopback port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
