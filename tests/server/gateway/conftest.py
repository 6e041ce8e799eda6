"""Two servers behind a gateway, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateways import ChangingBackends, RunningGateway, counting_app
from servers import RunningServer, Serve
from waiting import wait_until


@pytest.fixture
def start() -> Iterator[Callable[..., RunningGateway]]:
    """Start gateways; all are stopped when the test ends."""
    running: list[RunningGateway] = []

    def begin(*urls: str, source: Any = None, **options: Any) -> RunningGateway:
        running.append(RunningGateway(source or ChangingBackends(urls), **options))
        return running[-1]

    yield begin
    for gateway in running:
        gateway.stop()


@pytest.fixture(scope="module")
def servers(serve_once: Serve) -> list[RunningServer]:
    """The servers `red` and `blue`, with eight slots each."""
    return [serve_once(counting_app(name)) for name in ("red", "blue")]


@pytest.fixture(scope="module")
def shared(servers: list[RunningServer]) -> Iterator[RunningGateway]:
    """A gateway in front of them."""
    gateway = RunningGateway(ChangingBackends([server.url for server in servers]))
    yield gateway
    gateway.stop()


@pytest.fixture
def gateway(shared: RunningGateway, servers: list[RunningServer]) -> Iterator[RunningGateway]:
    """The shared one; after the test no session and no connection is left."""
    shared.refresh()
    yield shared
    for server in servers:
        wait_until(lambda server=server: server.manager.active == 0)
    wait_until(lambda: not shared.gateway.sockets)
