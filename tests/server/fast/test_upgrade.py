"""Our WebSocket protocol for uvicorn with applications that are not ours: plain ASGI, denials, failures."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from openenv.server.fast.frame_socket import take_over
from openenv.server.fast.upgrade import UpgradeProtocol
from servers import Serve
from waiting import wait_until

HANDSHAKE = (
    "GET /some%20path?a=1 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: {version}\r\n\r\n"
)


def raw_answer(port: int, *, key: str = "dGhlIHNhbXBsZSBub25jZQ==", version: str = "13") -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(HANDSHAKE.format(key=key, version=version).encode())
        return sock.recv(65_536).decode()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    assert (await receive())["type"] == "websocket.connect"
    chosen = "two" if "two" in scope["subprotocols"] else None
    await send({"type": "websocket.accept", "subprotocol": chosen, "headers": [(b"x-own", b"1")]})
    while (message := await receive())["type"] == "websocket.receive":
        if message.get("text") == "bye":
            await send({"type": "websocket.close", "code": 4001, "reason": "as you wish"})
            return
        if message.get("bytes") is not None:
            await send({"type": "websocket.send", "bytes": message["bytes"]})
        else:
            await send({"type": "websocket.send", "text": message["text"]})


def test_an_asgi_application_speaks_over_it(serve: Serve) -> None:
    server = serve(echo, lifespan="off")
    url = f"ws://127.0.0.1:{server.port}/"
    with connect(url, proxy=None, subprotocols=["one", "two"], max_size=None) as connection:  # type: ignore[list-item]
        assert connection.subprotocol == "two"
        assert connection.response is not None
        assert connection.response.headers["x-own"] == "1"
        for message in ("text", "ünï", b"\x00\xff", "x" * 1_000_000, ""):
            connection.send(message)
            assert connection.recv(timeout=10) == message
        connection.send("bye")
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(timeout=10)
    assert caught.value.rcvd is not None
    assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (4001, "as you wish")


def test_a_client_whose_messages_are_not_received_has_to_wait(serve: Serve) -> None:
    release = threading.Event()
    received: list[str] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.to_thread(release.wait, 60)
        while (message := await receive())["type"] == "websocket.receive":
            received.append(message["text"])

    server = serve(slow, lifespan="off")
    messages = [f"{number} " + "x" * 1_000_000 for number in range(100)]
    with connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as connection:
        sent: list[int] = []

        def send_all() -> None:
            for number, message in enumerate(messages):
                connection.send(message)
                sent.append(number)

        sending = threading.Thread(target=send_all)
        sending.start()
        sending.join(2)
        assert len(sent) < len(messages) / 2  # the rest is not in the server's memory
        release.set()
        sending.join(30)
        assert not sending.is_alive()
        connection.close()
    wait_until(lambda: len(received) >= len(messages))
    assert received == messages


def test_the_answer_to_a_handshake_is_that_of_the_rfc(serve: Serve) -> None:
    answer = raw_answer(serve(echo, lifespan="off").port)
    assert answer.startswith("HTTP/1.1 101 Switching Protocols\r\n")
    assert "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer, "the example of RFC 6455, 1.3"


@pytest.mark.parametrize("wrong", [{"key": "short"}, {"version": "8"}])
def test_a_handshake_that_is_wrong_is_a_bad_request(serve: Serve, wrong: dict[str, str]) -> None:
    assert raw_answer(serve(echo, lifespan="off").port, **wrong).startswith("HTTP/1.1 400 ")


def test_the_scope_has_path_query_and_headers(serve: Serve) -> None:
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await receive()
        await send({"type": "websocket.close"})

    assert raw_answer(serve(app, lifespan="off").port).startswith("HTTP/1.1 403 ")
    assert (scopes[0]["path"], scopes[0]["query_string"]) == ("/some path", b"a=1")
    assert (b"host", b"x") in scopes[0]["headers"]


def test_an_application_may_deny_with_a_response_of_its_own(serve: Serve) -> None:
    async def deny(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        start = {"type": "websocket.http.response.start", "status": 401, "headers": [(b"x-why", b"key")]}
        await send(start)
        await send({"type": "websocket.http.response.body", "body": b"no ", "more_body": True})
        await send({"type": "websocket.http.response.body", "body": b"key"})

    server = serve(deny, lifespan="off")
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://127.0.0.1:{server.port}/", proxy=None).__enter__()
    response = caught.value.response
    assert (response.status_code, response.body, response.headers["x-why"]) == (401, b"no key", "key")


@pytest.mark.parametrize("accept", [True, False], ids=["after accept", "before accept"])
def test_an_application_that_fails_ends_the_connection(serve: Serve, accept: bool) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if accept:
            await send({"type": "websocket.accept"})
        raise RuntimeError("application failure")

    server = serve(fail, lifespan="off", log_level="critical")
    if not accept:
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://127.0.0.1:{server.port}/", proxy=None).__enter__()
        assert refused.value.response.status_code == 500
        return
    with connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as connection:
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(timeout=10)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1011


def test_a_client_that_leaves_is_reported_to_the_application(serve: Serve) -> None:
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        events.append((await receive())["type"])

    server = serve(app, lifespan="off")
    with connect(f"ws://127.0.0.1:{server.port}/", proxy=None):
        pass
    server.wait_for(lambda: events == ["websocket.disconnect"])


def test_an_application_learns_with_which_code_its_client_has_closed(serve: Serve) -> None:
    codes: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            pass
        codes.append(message["code"])

    server = serve(app, lifespan="off")
    with connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as connection:
        connection.send("hi")
        connection.close(4001)
    server.wait_for(lambda: codes == [4001])


@pytest.mark.parametrize(
    ("status", "fails", "answered"), [(499, False, 499), (401, True, 500)], ids=["odd status", "failure in it"]
)
def test_a_denial_is_always_answered(serve: Serve, status: int, fails: bool, answered: int) -> None:
    async def deny(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.http.response.start", "status": status, "headers": []})
        if fails:
            raise RuntimeError("application failure")
        await send({"type": "websocket.http.response.body", "body": b"x"})

    answer = raw_answer(serve(deny, lifespan="off", log_level="critical").port)
    assert answer.startswith(f"HTTP/1.1 {answered} ")


def test_an_endpoint_that_took_the_connection_and_failed_closes_it(serve: Serve) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        assert take_over(receive, max_size=1000) is not None
        raise RuntimeError("endpoint failure")

    server = serve(app, lifespan="off", log_level="critical")
    with connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as connection:
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(timeout=10)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1011


def test_an_application_that_outlives_the_shutdown_is_ended_without_a_traceback(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    server = serve(app, lifespan="off", timeout_graceful_shutdown=1)
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    try:
        with connect(f"ws://127.0.0.1:{server.port}/", proxy=None):
            server.server.should_exit = True
            server.wait_for(lambda: ended == ["cancelled"])
    finally:
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.anyio
async def test_a_shutdown_bears_a_connection_that_is_closing() -> None:
    here, there = socket.socketpair()
    with there:
        config = uvicorn.Config(echo, lifespan="off", ws=UpgradeProtocol, log_config=None)
        config.load()
        transport, protocol = await asyncio.get_running_loop().create_connection(
            lambda: UpgradeProtocol(config, ServerState(), {}), sock=here
        )
        transport.close()
        protocol.shutdown()
        assert (await protocol.receive())["type"] == "websocket.disconnect"
