"""The short way from a connection to the environment's endpoints: taken where it makes no difference, only there."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import http_calls
import openenv.server.http_routes as http_module
from environments import Heard, Parrot, Say
from openenv.server.app import create_app
from openenv.server.fast.dispatch import DirectDispatch
from openenv.server.request_head import is_plain_upgrade
from servers import Serve

SESSION = "X-OpenEnv-Session"
HEAD = (
    b"GET /ws HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture
def app() -> FastAPI:
    return create_app(Parrot, Say, Heard, max_concurrent_envs=8)


@pytest.fixture
def short_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which requests have taken the short way; the way itself is the real one."""
    taken: list[str] = []

    class Watched(DirectDispatch):
        def handler(self, scope: Any) -> Any:
            found = super().handler(scope)
            taken.extend([scope["path"]] * (found is not None))
            return found

        def endpoint(self, scope: Any) -> Any:
            found = super().endpoint(scope)
            taken.extend([scope["path"]] * (found is not None))
            return found

    monkeypatch.setattr("openenv.server.fast.upgrade.DirectDispatch", Watched)
    monkeypatch.setattr("openenv.server.fast.http.DirectDispatch", Watched)
    return taken


def ask(server: Any, message: str = "a", **options: Any) -> Any:
    """Step once over a new WebSocket connection."""
    with connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None, **options) as connection:
        connection.send(json.dumps({"type": "step", "data": {"message": message}}))
        return json.loads(connection.recv(10))


def begin(server: Any) -> dict[str, str]:
    """Open an HTTP session; return the header that names it."""
    http_calls.get(f"{server.url}/health").raise_for_status()
    answer = http_calls.post(f"{server.url}/reset", json={}, headers={SESSION: "new"})
    return {SESSION: answer.headers[SESSION]}


def step(server: Any, headers: dict[str, str], message: str = "a") -> Any:
    return http_calls.post(f"{server.url}/step", json={"action": {"message": message}}, headers=headers)


def test_an_application_as_it_was_made_is_reached_the_short_way(
    app: FastAPI, serve: Serve, short_ways: list[str]
) -> None:
    server = serve(app)
    headers = begin(server)
    assert step(server, headers).json()["observation"]["text"] == "a"
    assert ask(server)["data"]["observation"]["text"] == "a"
    assert {"/step", "/ws"} <= set(short_ways)


def test_both_ways_give_the_same_answers(app: FastAPI, serve: Serve) -> None:
    other = create_app(Parrot, Say, Heard, max_concurrent_envs=8)
    other.add_middleware(Recorder, seen=[])
    answers = []
    for server in (serve(app), serve(other)):
        headers = begin(server)
        rows: list[Any] = [step(server, headers), step(server, headers, "boom"), step(server, {SESSION: "nobody"})]
        rows.append(http_calls.post(f"{server.url}/step", content=b"{", headers=headers))
        rows.append(http_calls.get(f"{server.url}/state", headers=headers))
        rows.append(http_calls.get(f"{server.url}/step", headers=headers))
        rows.append(http_calls.delete(f"{server.url}/sessions/{headers[SESSION]}", headers=headers))
        frames = [ask(server), ask(server, "boom")]
        answers.append(([(row.status_code, row.text.replace(headers[SESSION], "ID")) for row in rows], frames))
    assert answers[0] == answers[1]


class Recorder:
    """Middleware of an application's own."""

    def __init__(self, app: Any, seen: list[str]) -> None:
        self.app = app
        self.seen = seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            self.seen.append(scope["path"])
        await self.app(scope, receive, send)


def test_middleware_sees_every_request(app: FastAPI, serve: Serve, short_ways: list[str]) -> None:
    seen: list[str] = []
    app.add_middleware(Recorder, seen=seen)
    server = serve(app)
    headers = begin(server)
    step(server, headers)
    ask(server)
    assert seen == ["/health", "/reset", "/step", "/ws"]
    assert not short_ways


def test_an_application_around_the_application_sees_every_request(app: FastAPI, serve: Serve) -> None:
    seen: list[str] = []
    server = serve(Recorder(app, seen))
    step(server, begin(server))
    assert ask(server)["type"] == "observation"
    assert seen == ["/health", "/reset", "/step", "/ws"]


def test_layers_put_around_the_stack_by_hand_are_respected(app: FastAPI, serve: Serve) -> None:
    seen: list[str] = []
    app.middleware_stack = Recorder(app.build_middleware_stack(), seen)
    server = serve(app)
    step(server, begin(server))
    ask(server)
    assert seen == ["/health", "/reset", "/step", "/ws"]


def test_routes_that_were_replaced_are_used(app: FastAPI, serve: Serve) -> None:
    server = serve(app)
    headers = begin(server)
    assert step(server, headers).status_code == 200
    assert ask(server)["type"] == "observation"
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") not in ("/step", "/ws")]

    async def own_step() -> JSONResponse:
        return JSONResponse({"own": True})

    async def own_socket(socket: WebSocket) -> None:
        await socket.accept()
        await socket.receive_text()
        await socket.send_text('"own"')

    app.add_api_route("/step", own_step, methods=["POST"])
    app.add_api_websocket_route("/ws", own_socket)
    assert step(server, headers).json() == {"own": True}
    assert ask(server) == "own"


def test_a_route_in_front_comes_first(app: FastAPI, serve: Serve) -> None:
    async def any_socket(socket: WebSocket, name: str) -> None:
        await socket.accept()
        await socket.receive_text()
        await socket.send_text(json.dumps(name))

    app.add_api_websocket_route("/{name}", any_socket)
    app.router.routes.insert(0, app.router.routes.pop())
    server = serve(app)
    assert [ask(server), ask(server)] == ["ws", "ws"]


def test_a_route_that_was_removed_is_not_found(app: FastAPI, serve: Serve) -> None:
    server = serve(app)
    assert ask(server)["type"] == "observation"
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") != "/ws"]
    with pytest.raises(InvalidStatus) as refused:
        ask(server)
    assert refused.value.response.status_code == 403


def test_foreign_pages_are_refused_on_the_short_way_too(app: FastAPI, serve: Serve) -> None:
    server = serve(app)
    headers = begin(server)
    ask(server)
    with pytest.raises(InvalidStatus) as refused:
        ask(server, additional_headers={"Origin": "http://elsewhere.example"})
    assert refused.value.response.status_code == 403
    assert step(server, {**headers, "Origin": "http://elsewhere.example"}).status_code == 403


def test_an_application_under_observation_is_reached_the_long_way(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry = getattr(app, "_native_telemetry", None)
    if telemetry is None:
        pytest.skip("this FastAPI reports no requests")
    served = DirectDispatch(app)
    scope = {"type": "websocket", "path": "/ws", "root_path": "", "headers": []}
    app.middleware_stack = app.build_middleware_stack()
    monkeypatch.setattr(telemetry, "enabled", lambda: True)
    assert served.endpoint(scope) is None
    monkeypatch.setattr(telemetry, "enabled", lambda: False)
    assert served.endpoint(scope) is not None


def test_requests_without_a_session_reach_the_handlers_of_the_application(app: FastAPI, serve: Serve) -> None:
    async def handle(request: Any, exc: Exception) -> JSONResponse:
        return JSONResponse({"handled": str(exc)}, 418)

    app.add_exception_handler(RuntimeError, handle)
    server = serve(app)
    begin(server)
    assert step(server, {}, "boom").json() == {"handled": "it broke"}


@pytest.mark.parametrize(
    "head",
    [
        HEAD,
        HEAD.replace(b"Upgrade: websocket", b"upgrade:WebSocket "),
        HEAD.replace(b"/ws", b"/ws?session_id=1&x=%20"),
    ],
)
def test_a_plain_upgrade_is_recognised(head: bytes) -> None:
    assert is_plain_upgrade(head)


@pytest.mark.parametrize(
    "head",
    [
        HEAD[:-2],
        HEAD + b"\x81\x80abcd",
        HEAD.replace(b"GET", b"POST"),
        HEAD.replace(b"GET /ws", b"GET http://here/ws"),
        HEAD.replace(b"/ws", b"/w s"),
        HEAD.replace(b"/ws", b"/\xc3\xa9"),
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD.replace(b"Host:", b"Host :"),
        HEAD.replace(b"Host: here", b"Host: here\r\n there"),
        HEAD.replace(b"Host: here", b"Host: he\nre"),
        HEAD.replace(b"here", b"he\x00re"),
        HEAD.replace(b"Upgrade: websocket", b"Upgrade: h2c"),
        HEAD.replace(b"keep-alive, Upgrade", b"keep-alive"),
        b"",
    ],
)
def test_anything_else_is_left_to_the_http_parser(head: bytes) -> None:
    assert not is_plain_upgrade(head)


@pytest.mark.parametrize("at", [1, 10, 60, len(HEAD) - 1])
def test_an_upgrade_request_may_come_in_pieces(app: FastAPI, serve: Serve, at: int) -> None:
    server = serve(app)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
        peer.sendall(HEAD[:at])
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.wait_for(lambda: len(server.server.server_state.connections) == 1)
        peer.sendall(HEAD[at:])
        assert peer.recv(12) == b"HTTP/1.1 101"


def test_a_connection_that_says_nothing_does_not_hold_up_a_shutdown(app: FastAPI, serve: Serve) -> None:
    server = serve(app)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
        server.wait_for(lambda: len(server.server.server_state.connections) == 1)
        server.server.should_exit = True
        assert silent.recv(1) == b""


def test_a_shutdown_that_stops_waiting_sends_close_frames(app: FastAPI, serve: Serve) -> None:
    Parrot.gate.clear()
    server = serve(app, timeout_graceful_shutdown=1)
    http_calls.get(f"{server.url}/health").raise_for_status()
    try:
        with connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None) as connection:
            connection.send(json.dumps({"type": "step", "data": {"message": "wait"}}))
            server.wait_for(lambda: any(not session.is_idle for session in server.manager.sessions()))
            server.server.should_exit = True
            with pytest.raises(ConnectionClosed) as ended:
                connection.recv(15)
            assert ended.value.rcvd is not None
            assert ended.value.rcvd.code == 1012
    finally:
        Parrot.gate.set()


def test_a_connection_that_goes_without_a_word_is_forgotten(app: FastAPI, serve: Serve) -> None:
    server = serve(app)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10):
        server.wait_for(lambda: len(server.server.server_state.connections) == 1)
    server.wait_for(lambda: not server.server.server_state.connections)


def test_only_named_sessions_take_the_short_way() -> None:
    assert http_module.names_session({"headers": [(b"x-openenv-session", b"new")]})
    assert not http_module.names_session({"headers": [(b"cookie", b"openenv_session=1")]})


class Bare(Exception):
    """An exception that only the application can handle."""


class Bursts(Parrot):
    """An environment whose steps raise, or whose constructor does."""

    constructors = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).constructors += 1

    def step(self, action: Say, **kwargs: Any) -> Heard:
        raise Bare("from the step")


def test_handlers_of_the_application_get_the_exceptions_of_calls_without_a_session(
    serve: Serve, short_ways: list[str]
) -> None:
    app = create_app(Bursts, Say, Heard, max_concurrent_envs=8)

    @app.exception_handler(Bare)
    async def answer(request: Any, exc: Exception) -> JSONResponse:
        return JSONResponse({"handled": str(exc), "path": request.url.path}, 418)

    server = serve(app)
    http_calls.get(f"{server.url}/health").raise_for_status()
    before = Bursts.constructors
    answered = step(server, {})
    assert (answered.status_code, answered.json()) == (418, {"handled": "from the step", "path": "/step"})
    assert short_ways == ["/step"]
    assert Bursts.constructors == before + 1  # the call did not run again


def test_calls_without_a_session_take_the_short_way_and_answer_alike(
    app: FastAPI, serve: Serve, short_ways: list[str]
) -> None:
    other = create_app(Parrot, Say, Heard, max_concurrent_envs=8)
    other.add_middleware(Recorder, seen=[])
    answers = []
    for server in (serve(app), serve(other)):
        http_calls.get(f"{server.url}/health").raise_for_status()
        rows: list[Any] = [step(server, {}), step(server, {}, "boom")]
        rows.append(http_calls.post(f"{server.url}/step", content=b"{"))
        rows.append(http_calls.post(f"{server.url}/reset", json={"seed": 3}))
        rows.append(http_calls.get(f"{server.url}/state"))
        rows.append(http_calls.get(f"{server.url}/step"))
        answers.append([(row.status_code, row.text.replace(_episode(row), "ID"), sorted(row.headers)) for row in rows])
    assert answers[0] == answers[1]
    assert short_ways.count("/step") == 3


def _episode(row: Any) -> str:
    """Return the random part of an answer."""
    body = row.json() if row.headers.get("content-type") == "application/json" else {}
    return str(body.get("episode_id") or "no episode")


def test_a_response_to_an_environments_call_is_one_write(app: FastAPI, serve: Serve) -> None:
    server = serve(app)
    http_calls.get(f"{server.url}/health").raise_for_status()
    body = json.dumps({"action": {"message": "a"}}).encode()
    request = b"POST /step HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for _ in range(20):
            connection.sendall(request)
            answer = connection.recv(65536)  # the first packet holds head and body
            head, _, rest = answer.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert json.loads(rest)["observation"]["text"] == "a"
            assert len(rest) == length
        connection.sendall(request * 3)  # pipelined requests get their responses in order
        received = b""
        while received.count(b"HTTP/1.1 200") < 3 or not received.endswith(b"}"):
            received += connection.recv(65536)
        connection.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        assert received.endswith(b"}"), "closed before the body was written"
