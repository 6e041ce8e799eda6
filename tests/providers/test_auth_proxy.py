"""The local proxy in front of Hugging Face sandboxes: it adds headers, and only its own address leads anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from openenv.providers.hf_sandbox import AuthProxy
from servers import running_server


async def echo(request: Request) -> Response:
    body = (await request.body()).decode()
    headers = {name: request.headers.get(name) for name in ("authorization", "x-own", "host")}
    path = f"{request.url.path}?{request.url.query}"
    return JSONResponse({"body": body, "path": path, **headers}, status_code=207, headers={"x-answer": "yes"})


async def talk(socket: WebSocket) -> None:
    await socket.accept(subprotocol="two" if "two" in socket.scope["subprotocols"] else None)
    await socket.send_text(socket.headers["authorization"])
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if message.get("text") == "end":
            await socket.close(4001, "ended")
            return
        if message.get("bytes") is not None:
            await socket.send_bytes(message["bytes"])
        else:
            await socket.send_text(message["text"])


@pytest.fixture(scope="module")
def proxy() -> Iterator[AuthProxy]:
    routes = [WebSocketRoute("/inner/ws", talk), Route("/inner/{path:path}", echo, methods=["GET", "POST", "PUT"])]
    with running_server(Starlette(routes=routes), lifespan="off", http="auto", ws="auto") as server:
        tokens = iter(range(1000))
        proxy = AuthProxy(f"{server.url}/inner/", lambda: {"Authorization": f"Bearer {next(tokens)}"})
        proxy.start()
        yield proxy
        proxy.close()


def test_requests_arrive_with_the_current_headers_and_in_place_of_the_clients(proxy: AuthProxy) -> None:
    sent = {"Authorization": "Bearer of the client", "X-Own": "kept"}
    first, second = (
        httpx2.post(f"{proxy.url}/a/b?c=d", content=b"body", headers=sent, trust_env=False) for _ in range(2)
    )
    assert (first.status_code, first.headers["x-answer"]) == (207, "yes")
    answer = first.json()
    assert (answer["body"], answer["path"], answer["x-own"]) == ("body", "/inner/a/b?c=d", "kept")
    assert answer["authorization"].startswith("Bearer ")
    assert answer["authorization"] != second.json()["authorization"] != "Bearer of the client"


def test_without_the_secret_part_of_the_address_nothing_is_answered(proxy: AuthProxy) -> None:
    root = proxy.url.rpartition("/")[0]
    for path in ("", "/", "/health", "/wrong/health"):
        assert httpx2.get(f"{root}{path}", trust_env=False).status_code == 404
    with pytest.raises(InvalidStatus):
        connect(f"ws{root.removeprefix('http')}/ws", proxy=None)


def test_sockets_carry_text_bytes_subprotocols_and_the_reason_of_their_end(proxy: AuthProxy) -> None:
    url = f"ws{proxy.url.removeprefix('http')}/ws"
    with connect(url, subprotocols=["one", "two"], proxy=None) as socket:  # type: ignore[list-item]
        assert socket.subprotocol == "two"
        assert str(socket.recv(10)).startswith("Bearer ")
        for data in ("text", b"\x00\xff" * 100_000):
            socket.send(data)
            assert socket.recv(10) == data
        socket.send("end")
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(10)
    assert caught.value.rcvd is not None
    assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (4001, "ended")


def test_what_cannot_be_reached_is_a_bad_gateway() -> None:
    proxy = AuthProxy("http://127.0.0.1:9", dict)
    proxy.start()
    try:
        assert httpx2.get(f"{proxy.url}/health", trust_env=False).status_code == 502
    finally:
        proxy.close()
