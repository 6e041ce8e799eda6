"""Servers with several workers, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from worker_servers import WorkersServer


@pytest.fixture
def start() -> Iterator[Callable[..., WorkersServer]]:
    """Start servers; all are ended with the test."""
    running: list[WorkersServer] = []

    def begin(*arguments: str, **options: Any) -> WorkersServer:
        running.append(WorkersServer(*arguments, **options))
        return running[-1]

    yield begin
    for server in running:
        server.end()


@pytest.fixture(scope="module")
def shared() -> Iterator[list[WorkersServer]]:
    """The server that tests share, if one has been started."""
    servers: list[WorkersServer] = []
    yield servers
    for server in servers:
        server.end()


@pytest.fixture
def server(shared: list[WorkersServer]) -> Iterator[WorkersServer]:
    """A server with two workers and eight slots, all free again after the test, unless that has ended the server."""
    if not shared or shared[-1].process.poll() is not None:
        shared.append(WorkersServer("--workers", "2", "--max-sessions", "8", "--grace", "30"))
    yield shared[-1]
    if shared[-1].process.poll() is None:
        shared[-1].wait_for(lambda: shared[-1].ready["active_sessions"] == 0)
