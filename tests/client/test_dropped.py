"""Clients that were not closed: the last reference ends the session, and a private loop is closed in any case."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.errors import ExecutionError


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """No help from the collector of cycles, and no warnings about sockets: they are the subject."""
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
    finally:
        gc.enable()


@pytest.mark.parametrize("sync", [True, False])
def test_dropping_a_blocking_client_ends_its_session_at_once(parrot: Any, sync: bool) -> None:
    with without_gc():
        client: Any = GenericEnvClient(parrot.url).sync() if sync else GenericEnvClient(parrot.url)
        client.reset()
        assert parrot.manager.active == 1
        del client
        parrot.wait_for(lambda: parrot.manager.active == 0)


def test_an_error_does_not_keep_a_dropped_client_alive(parrot: Any) -> None:
    with without_gc():
        client: Any = GenericEnvClient(parrot.url).sync()
        with contextlib.suppress(ExecutionError):
            client.reset(fail=True)
        client.reset()
        del client
        parrot.wait_for(lambda: parrot.manager.active == 0)


def test_dropping_an_awaited_client_ends_its_session_while_its_loop_runs(parrot: Any) -> None:
    async def main() -> None:
        client = GenericEnvClient(parrot.url)
        await client.reset()
        assert parrot.manager.active == 1
        del client
        await asyncio.to_thread(parrot.wait_for, lambda: parrot.manager.active == 0)

    with without_gc():
        asyncio.run(main())


def test_the_socket_address_of_a_client_is_an_attribute() -> None:
    client = GenericEnvClient("http://host:8000")
    assert client._ws_url == "ws://host:8000/ws"
    client._ws_url = "ws://other/ws"
    assert client._driver.url == client._ws_url == "ws://other/ws"


class Helped(GenericEnvClient):
    loops: list[asyncio.AbstractEventLoop]

    async def begin(self) -> None:
        self.loops = [asyncio.get_running_loop()]
        await self.reset()

    async def finish(self) -> None:
        self.loops = [asyncio.get_running_loop()]
        await self.close()


def test_a_helper_that_closes_its_client_leaves_no_open_loop(parrot: Any) -> None:
    client = Helped(parrot.url).sync()
    client.begin()
    client.finish()
    assert client.loops[0].is_closed()


def test_the_loop_of_helpers_is_closed_with_a_connection_that_was_already_lost(parrot: Any) -> None:
    client = Helped(parrot.url).sync()
    client.begin()
    client._driver._connection.drop("a broken cable")
    client.close()
    assert client.loops[0].is_closed()


def test_the_loop_of_helpers_is_closed_with_a_dropped_client(parrot: Any) -> None:
    with without_gc():
        client: Any = Helped(parrot.url).sync()
        client.begin()
        loops = client.loops
        del client
        parrot.wait_for(lambda: loops[0].is_closed())
