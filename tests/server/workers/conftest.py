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
def shared() -> Iterator[WorkersServer]:
    """A server with two workers and eight slots."""
    server = WorkersServer("--workers", "2", "--max-sessions", "8", "--grace", "30")
    yield server
    server.end()


@pytest.fixture
def server(shared: WorkersServer) -> Iterator[WorkersServer]:
    """The shared one, with all slots free again after the test."""
    yield shared
    shared.wait_for(lambda: shared.ready["active_sessions"] == 0)
