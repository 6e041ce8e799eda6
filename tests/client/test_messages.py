"""Texts for users: errors that name the field, the cause, the address or the setting; short reprs."""

from __future__ import annotations

import asyncio
import gc
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from dict_client import DictHTTPClient
from environments import Idle
from openenv import GenericEnvClient
from openenv.errors import (
    ConnectFailed,
    EnvironmentFactoryError,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
)
from openenv.protocol.client_sessions import error_from_frame
from openenv.server.app import create_app
from openenv.types import Action, Observation
from servers import Serve
from waiting import wait_until_async


class Number(Action):
    n: int


class Broken(Idle):
    def __init__(self) -> None:
        raise ValueError("no such data set")


def test_a_refused_action_names_the_field_and_what_is_wrong_with_it(serve: Serve) -> None:
    server = serve(create_app(Idle, Number, Observation, max_concurrent_envs=4))
    with GenericEnvClient(server.url).sync() as client, DictHTTPClient(server.url) as over_http:
        client.reset()
        with pytest.raises(RequestValidationError) as caught:
            client.step({"n": "x"})
        text = str(caught.value)
        assert text.startswith("Server error: Invalid message: n: Input should be a valid integer")
        assert text.endswith("(code: VALIDATION_ERROR)")
        over_http.reset()
        with pytest.raises(RequestValidationError) as caught:
            over_http.step({"n": "x"})
        text = str(caught.value)
        assert text.startswith("Server error: ")
        assert "n: Input should be a valid integer" in text
        assert "[" not in text
        assert text.endswith("(code: VALIDATION_ERROR)")


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        (None, "Server error: Invalid message (code: VALIDATION_ERROR)"),
        ([], "Server error: Invalid message (code: VALIDATION_ERROR)"),
        (["odd", {"loc": 3}], "Server error: Invalid message (code: VALIDATION_ERROR)"),
        ([{"loc": [], "msg": "bad"}], "Server error: Invalid message: bad (code: VALIDATION_ERROR)"),
        (
            [{"loc": ["a", i], "msg": "bad"} for i in range(5)],
            "Server error: Invalid message: a.0: bad; a.1: bad; a.2: bad; and 2 more (code: VALIDATION_ERROR)",
        ),
    ],
)
def test_only_the_first_fields_are_reported_and_odd_lists_are_left_out(errors: Any, text: str) -> None:
    error = error_from_frame({"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors})
    assert str(error) == text


def test_a_failing_constructor_is_reported_with_its_reason(serve: Serve) -> None:
    server = serve(create_app(Broken, Number, Observation))
    with pytest.raises(EnvironmentFactoryError) as caught:
        GenericEnvClient(server.url).sync().reset()
    text = str(caught.value)
    assert "failed to create instance." in text
    assert text.count("no such data set") == 1
    assert text.endswith("(code: FACTORY_ERROR)")
    bare = error_from_frame({"message": "failed.", "code": "FACTORY_ERROR", "factory_name": "f"})
    assert str(bare) == "Server error: failed. (code: FACTORY_ERROR)"


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
def test_a_full_server_is_reported_plainly_with_advice(
    serve: Serve, parrot_app: Callable[..., Any], blocking: bool
) -> None:
    server = serve(parrot_app(sessions=1))

    async def awaited() -> None:
        client = GenericEnvClient(server.url, protocol="v1")
        await client.connect()
        connection = client._driver._connection  # the refusal comes before anything is asked
        await wait_until_async(lambda: connection.websocket.messages)
        await client.reset()

    with GenericEnvClient(server.url).sync() as holder:
        holder.reset()
        with pytest.raises(SessionCapacityError) as caught:
            if blocking:
                client = GenericEnvClient(server.url, protocol="v1").sync().connect()
                server.wait_for(
                    lambda: client._driver.keep_alive() or bool(client._driver._connection.websocket.messages)
                )
                client.reset()
            else:
                asyncio.run(awaited())
    assert caught.value.__context__ is None
    assert "--max-sessions" in str(caught.value)
    assert str(caught.value).endswith("(code: CAPACITY_REACHED)")
    assert "Unasked" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("suffix", ["", "/", "/ws", "/ws/"])
def test_an_address_may_end_in_ws(parrot: Any, suffix: str) -> None:
    with GenericEnvClient(parrot.url + suffix).sync() as client, DictHTTPClient(parrot.url + suffix) as over_http:
        client.reset()
        over_http.reset()


def test_a_host_called_ws_is_a_host() -> None:
    assert GenericEnvClient("http://ws")._ws_url == "ws://ws/ws"
    assert GenericEnvClient("ws")._ws_url == "ws://ws/ws"
    assert DictHTTPClient("https://ws").base_url == "https://ws"


@pytest.mark.parametrize("client", [GenericEnvClient, DictHTTPClient])
@pytest.mark.parametrize("base_url", ["", "http://", "/ws", 5, "ftp://host", "http://host:port"])
def test_what_is_no_address_is_refused_at_once_with_an_example(client: Any, base_url: Any) -> None:
    with pytest.raises(ValueError) as caught:
        client(base_url)
    assert repr(base_url) in str(caught.value)
    assert "http://localhost:8000" in str(caught.value)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
@pytest.mark.parametrize("kind", ["refused", "wrong", "silent"])
def test_a_failed_connection_names_the_address(parrot: Any, blocking: bool, kind: str) -> None:
    async def awaited(client: Any) -> None:
        await client.connect()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        base = {"wrong": f"{parrot.url}/nowhere"}.get(kind, f"http://127.0.0.1:{port}")
        if kind == "refused":
            listener.close()
        client = GenericEnvClient(base, connect_timeout_s=0.2)
        with pytest.raises(ConnectFailed) as caught:
            client.sync().connect() if blocking else asyncio.run(awaited(client))
    text = str(caught.value)
    assert text.count("Failed to connect to") == 1
    assert base.replace("http", "ws") + "/ws" in text


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
def test_a_reply_over_the_limit_names_the_setting(parrot: Any, blocking: bool) -> None:
    client: Any = GenericEnvClient(parrot.url, max_message_size_mb=0.25)

    async def awaited() -> None:
        await client.reset()
        await client.step({"message": "x" * 1_000_000})

    with pytest.raises(SessionLost, match=r"max_message_size_mb=0\.25"):
        if blocking:
            client.reset()
            client.step({"message": "x" * 1_000_000})
        else:
            asyncio.run(awaited())
    if blocking:
        client.close()


@pytest.mark.slow_but_for("connect", "reset")
@pytest.mark.parametrize("method", ["connect", "reset", "state", "disconnect", "close"])
def test_a_forgotten_await_names_the_method(parrot: Any, method: str) -> None:
    async def forget() -> None:
        getattr(GenericEnvClient(parrot.url), method)()
        gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(forget())
    assert f"coroutine 'EnvClient.{method}' was never awaited" in [str(warning.message) for warning in caught]


def test_a_client_shows_where_and_how_it_is(parrot: Any) -> None:
    client = GenericEnvClient(parrot.url)
    assert repr(client) == f"<GenericEnvClient {parrot.url}, not connected>"
    with client.sync() as twin:
        assert repr(twin) == f"<SyncEnvClient of <GenericEnvClient {parrot.url}, connected>>"
        twin.reset()
    assert repr(client) == f"<GenericEnvClient {parrot.url}, lost: closed by the client>"
    assert "without a server" in repr(GenericEnvClient(provider=object()))
    with DictHTTPClient(parrot.url) as over_http:
        assert repr(over_http) == f"<DictHTTPClient {parrot.url}, no session>"
        over_http.reset()
        assert over_http.session_id in repr(over_http)
    assert "lost: closed by the client" in repr(over_http)
