"""A server that says more than it was asked: a reply must never be taken for that of another request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from websockets.sync.server import ServerConnection, serve

from openenv.client.env_client import GenericEnvClient
from openenv.errors import SessionCapacityError, SessionLost
from waiting import wait_until, wait_until_async


def _reply(number: int) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"n": number}, "reward": None, "done": False}})


def _stutter(connection: ServerConnection) -> None:
    for number, _ in enumerate(connection):
        connection.send(_reply(number))
        connection.send(_reply(number))


def _refuse(connection: ServerConnection) -> None:
    error = {"message": "full", "code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}
    connection.send(json.dumps({"type": "error", "data": error}))


@pytest.fixture(params=[_stutter, _refuse])
def talkative(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A server that speaks unasked, and how it does."""
    with serve(request.param, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield request.param.__name__, f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(5)


def test_a_reply_that_came_unasked_loses_the_session_instead_of_answering_the_next_request(
    talkative: tuple[str, str],
) -> None:
    kind, url = talkative
    with GenericEnvClient(base_url=url).sync() as client:
        if kind == "_refuse":
            with pytest.raises(SessionCapacityError):
                client.reset()
            return
        assert client.reset().observation == {"n": 0}
        driver = client.async_client._driver
        # What the keep-alive thread does between two requests.
        wait_until(lambda: driver.keep_alive() or driver._connection.websocket.messages)
        for _ in range(2):
            with pytest.raises(SessionLost):
                client.step({})


def test_the_same_holds_on_an_event_loop(talkative: tuple[str, str]) -> None:
    kind, url = talkative

    async def main() -> None:
        async with GenericEnvClient(base_url=url) as client:
            if kind == "_refuse":
                with pytest.raises(SessionCapacityError):
                    await client.reset()
                return
            assert (await client.reset()).observation == {"n": 0}
            await wait_until_async(lambda: client._driver._connection.websocket.messages)
            with pytest.raises(SessionLost):
                await client.step({})

    asyncio.run(main())


def test_a_refusal_is_reported_to_the_first_request_even_when_the_connection_is_already_gone(
    talkative: tuple[str, str],
) -> None:
    kind, url = talkative
    if kind != "_refuse":
        return
    with GenericEnvClient(base_url=url).sync() as client:
        driver = client.async_client._driver
        wait_until(lambda: driver.keep_alive() or driver._connection.websocket.messages)
        with pytest.raises(SessionCapacityError):
            client.step({})
        with pytest.raises(SessionLost):
            client.step({})
