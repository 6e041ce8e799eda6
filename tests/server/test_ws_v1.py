"""`/ws` frame by frame, on each carrier: our own upgrade, uvicorn's protocol taken over, and plain ASGI messages
(with compression, and where `OPENENV_FAST=0` asks for them)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

import http_calls
import openenv.server.ws as ws_module
from environments import Heard, Parrot, Say
from openenv.server.app import create_app
from openenv.server.fast.frame_socket import FrameSocket
from openenv.server.sockets import AsgiSocket
from servers import Serve, loops_by_uvloop

SETTINGS: dict[str, dict[str, Any]] = {
    "serve": {},
    "serve on uvloop": {},
    "plain uvicorn": {"ws": "websockets-sansio", "http": "auto"},
    "asgi": {"ws": "websockets-sansio", "ws_per_message_deflate": True},
    "OPENENV_FAST=0": {},
}


@pytest.fixture
def carriers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type[Any], str]]:
    """What each accepted connection is carried on, and by which kind of loop; the choice itself is the real one."""
    chosen: list[tuple[type[Any], str]] = []
    begin = ws_module.WsEndpoint.begin

    def watching(endpoint: Any, scope: Any, socket: Any, subprotocol: Any) -> Any:
        chosen.append((type(socket), type(asyncio.get_running_loop()).__module__.partition(".")[0]))
        return begin(endpoint, scope, socket, subprotocol)

    monkeypatch.setattr(ws_module.WsEndpoint, "begin", watching)
    return chosen


class Peer:
    """One raw client."""

    def __init__(self, connection: ClientConnection) -> None:
        self.ws = connection

    def ask(self, frame: Any) -> Any:
        self.ws.send(frame if isinstance(frame, (str, bytes)) else json.dumps(frame))
        return self.hear()

    def hear(self) -> Any:
        return json.loads(self.ws.recv(timeout=10))

    def step(self, message: str) -> Any:
        return self.ask({"type": "step", "data": {"message": message}})

    def code(self, frame: Any) -> str:
        reply = self.ask(frame)
        assert reply["type"] == "error", reply
        code: str = reply["data"]["code"]
        return code

    def closed_with(self) -> int:
        with pytest.raises(ConnectionClosed) as caught:
            self.ws.recv(timeout=10)
        assert caught.value.rcvd is not None
        return caught.value.rcvd.code


@pytest.fixture(params=list(SETTINGS))
def carrier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def started(serve: Serve, carrier: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    Parrot.gate.clear()
    if carrier == "OPENENV_FAST=0":
        monkeypatch.setenv("OPENENV_FAST", "0")
    with loops_by_uvloop() if "uvloop" in carrier else contextlib.nullcontext():
        return serve(create_app(Parrot, Say, Heard, max_concurrent_envs=2), **SETTINGS[carrier])


@pytest.fixture
def dial(started: Any, carrier: str) -> Iterator[Callable[..., Peer]]:
    with contextlib.ExitStack() as stack:

        def dial(query: str = "") -> Peer:
            compression = "deflate" if carrier == "asgi" else None
            url = f"ws://127.0.0.1:{started.port}/ws{query}"
            return Peer(stack.enter_context(connect(url, compression=compression, proxy=None, max_size=None)))

        yield dial
        Parrot.gate.set()


def test_the_fast_path_is_taken_wherever_it_can_be(
    carriers: list[Any], dial: Callable[..., Peer], carrier: str
) -> None:
    assert dial().step("a")["data"]["observation"]["text"] == "a"
    loop = "uvloop" if carrier == "serve on uvloop" else "asyncio"
    assert carriers == [(AsgiSocket if carrier in ("asgi", "OPENENV_FAST=0") else FrameSocket, loop)]


def test_with_uvicorns_own_choice_of_protocol_the_fast_path_is_taken_too(carriers: list[Any], serve: Serve) -> None:
    server = serve(create_app(Parrot, Say, Heard), ws="auto", http="auto")
    with connect(f"ws://127.0.0.1:{server.port}/ws", compression=None, proxy=None) as connection:
        assert Peer(connection).step("a")["type"] == "observation"
    assert carriers == [(FrameSocket, "asyncio")]


def test_behind_the_settings_of_serve_compression_is_not_negotiated(carriers: list[Any], serve: Serve) -> None:
    server = serve(create_app(Parrot, Say, Heard))
    with connect(f"ws://127.0.0.1:{server.port}/ws", compression="deflate", proxy=None) as connection:
        assert Peer(connection).step("a")["type"] == "observation"
    assert carriers == [(FrameSocket, "asyncio")]


def test_each_request_has_its_reply(dial: Callable[..., Peer]) -> None:
    peer = dial()
    assert peer.ask({"type": "state"})["data"] == {"episode_id": None, "step_count": 0}
    assert peer.ask({"type": "reset", "data": {"seed": 4}})["data"]["observation"]["text"] == "seed 4"
    assert peer.ask({"type": "reset"})["data"]["observation"]["text"] == "seed None"
    reply = peer.step("hi")
    assert reply == {
        "type": "observation",
        "data": {"observation": {"text": "hi", "count": 1, "metadata": {}}, "reward": None, "done": False},
    }
    rpc = peer.ask({"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/list", "id": 5}})
    assert rpc["type"] == "mcp"
    assert (rpc["data"]["id"], rpc["data"]["error"]["code"]) == (5, -32603)


def test_mistakes_are_answered_and_the_session_lives(dial: Callable[..., Peer]) -> None:
    peer = dial()
    peer.step("a")
    assert peer.code("nonsense") == "INVALID_JSON"
    assert peer.code("[1]") == "INVALID_JSON"
    assert peer.code({"type": "fly"}) == "UNKNOWN_TYPE"
    assert peer.code({"type": "step"}) == "VALIDATION_ERROR"
    assert peer.code({"type": "step", "data": {"message": 7}}) == "VALIDATION_ERROR"
    assert peer.code({"type": "step", "data": {"message": "boom"}}) == "EXECUTION_ERROR"
    assert peer.step("b")["data"]["observation"]["count"] == 2


def test_a_binary_frame_is_answered_and_the_session_lives(dial: Callable[..., Peer]) -> None:
    peer = dial()
    assert peer.ask(b'{"type":"step","data":{"message":"a"}}')["type"] in ("observation", "error")
    assert peer.step("b")["type"] == "observation"


def test_frames_sent_ahead_are_answered_in_order(dial: Callable[..., Peer]) -> None:
    peer = dial()
    for i in range(200):
        peer.ws.send(json.dumps({"type": "step", "data": {"message": str(i)}}))
    assert [peer.hear()["data"]["observation"]["text"] for _ in range(200)] == [str(i) for i in range(200)]


def test_close_ends_the_connection_normally_and_frees_the_slot(dial: Callable[..., Peer], started: Any) -> None:
    peer = dial()
    peer.step("a")
    peer.ws.send('{"type":"close"}')
    assert peer.closed_with() == 1000
    started.wait_for(lambda: started.manager.active == 0)


def test_at_capacity_a_typed_error_precedes_a_normal_close(dial: Callable[..., Peer]) -> None:
    peers = [dial(), dial()]
    for peer in peers:
        peer.step("a")
    late = dial()
    data = late.hear()["data"]
    assert data["code"] == "CAPACITY_REACHED"
    assert (data["active_sessions"], data["max_sessions"]) == (2, 2)
    assert late.closed_with() == 1000


def test_a_client_that_vanishes_in_the_middle_of_a_step_is_noticed(dial: Callable[..., Peer], started: Any) -> None:
    peer = dial()
    peer.ws.send('{"type":"step","data":{"message":"wait"}}')
    started.wait_for(lambda: any(not session.is_idle for session in started.manager.sessions()))
    peer.ws.socket.shutdown(socket.SHUT_RDWR)
    started.wait_for(lambda: all(s.state.value == "closing" for s in started.manager.sessions()))
    Parrot.gate.set()
    started.wait_for(lambda: started.manager.active == 0)


def test_a_client_that_leaves_the_queue_for_a_slot_does_not_take_it_along(
    dial: Callable[..., Peer], started: Any
) -> None:
    blocked = [dial(), dial()]
    for peer in blocked:
        peer.ws.send('{"type":"step","data":{"message":"wait"}}')
    started.wait_for(lambda: sum(not s.is_idle for s in started.manager.sessions()) == 2)
    for peer in blocked:
        peer.ws.close()
    started.wait_for(lambda: all(s.state.value == "closing" for s in started.manager.sessions()))
    waiting = dial()
    waiting.ws.close()
    Parrot.gate.set()
    started.wait_for(lambda: started.manager.active == 0)
    fresh = [dial(), dial()]
    assert [peer.step("a")["type"] for peer in fresh] == ["observation"] * 2


def test_an_http_session_can_be_attached_to_by_one_socket_at_a_time(dial: Callable[..., Peer], started: Any) -> None:
    headers = {"X-OpenEnv-Session": "new"}
    name = http_calls.post(f"{started.url}/reset", json={}, headers=headers, trust_env=False).headers[
        "X-OpenEnv-Session"
    ]
    peer = dial(f"?session_id={name}")
    assert peer.step("a")["data"]["observation"]["count"] == 1
    second = dial(f"?session_id={name}")
    assert "already has an attached WebSocket" in second.hear()["data"]["message"]
    assert second.closed_with() == 1000
    peer.ws.close()
    started.wait_for(lambda: not started.manager.find(name).is_attached)
    again = dial(f"?session_id={name}")
    assert again.step("b")["data"]["observation"]["count"] == 2, "the session outlived its socket"
    unknown = dial("?session_id=nobody")
    data = unknown.hear()["data"]
    assert (data["code"], data["message"]) == ("SESSION_ERROR", "Unknown session_id: nobody")


def test_large_messages_pass_both_ways(dial: Callable[..., Peer]) -> None:
    text = "é" * 1_500_000
    assert dial().step(text)["data"]["observation"]["text"] == text


@pytest.mark.parametrize("carrier", ["serve", "serve on uvloop", "plain uvicorn"], indirect=True)
def test_a_message_over_the_limit_is_refused_and_the_session_lives(dial: Callable[..., Peer], started: Any) -> None:
    object.__setattr__(started.app.state.openenv_server.service.options, "max_message_bytes", 10_000)
    peer = dial()
    reply = peer.step("x" * 20_000)
    assert reply["data"]["code"] == "VALIDATION_ERROR"
    assert reply["data"]["limit_bytes"] == 10_000
    assert peer.step("y")["type"] == "observation"


def test_pings_are_answered(dial: Callable[..., Peer]) -> None:
    assert dial().ws.ping(b"are you there").wait(10)


def test_fragmented_messages_are_put_together(dial: Callable[..., Peer]) -> None:
    peer = dial()
    peer.ws.send(iter(['{"type":"step",', '"data":{"mess', 'age":"whole"}}']))
    assert peer.hear()["data"]["observation"]["text"] == "whole"


@pytest.mark.parametrize("carrier", ["serve", "serve on uvloop", "plain uvicorn"], indirect=True)
def test_a_peer_that_breaks_the_framing_rules_is_closed_with_1002(dial: Callable[..., Peer], started: Any) -> None:
    peer = dial()
    peer.step("a")
    peer.ws.socket.sendall(bytes((0x81, 0x01)) + b"x")
    assert peer.closed_with() == 1002
    started.wait_for(lambda: started.manager.active == 0)


def test_production_mode_plays_episodes_over_the_socket(serve: Serve, carrier: str) -> None:
    server = serve(create_app(Parrot, Say, Heard, mode="production"), **SETTINGS[carrier])
    with connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None) as connection:
        peer = Peer(connection)
        frames = ({"type": "reset"}, {"type": "step", "data": {"message": "a"}}, {"type": "state"})
        assert [peer.ask(frame)["type"] for frame in frames] == ["observation", "observation", "state"]
        assert peer.ask({"type": "mcp", "data": {"jsonrpc": "2.0", "method": "x", "id": 1}})["type"] == "mcp"


def test_a_factory_that_fails_is_a_typed_error_before_a_normal_close(serve: Serve, carrier: str) -> None:
    def broken() -> Parrot:
        raise OSError("no display")

    server = serve(create_app(broken, Say, Heard), **SETTINGS[carrier])
    with connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None) as connection:
        peer = Peer(connection)
        data = peer.hear()["data"]
        assert (data["code"], data["factory_name"]) == ("FACTORY_ERROR", "broken")
        assert "no display" in data["reason"]
        assert peer.closed_with() == 1000
    server.wait_for(lambda: server.manager.active == 0)


def test_shutting_down_lets_a_step_finish_and_closes_the_environment(dial: Callable[..., Peer], started: Any) -> None:
    Parrot.closed.clear()
    peer = dial()
    peer.step("a")
    started.server.should_exit = True
    with pytest.raises(ConnectionClosed):
        while True:
            peer.ws.recv(timeout=10)
    started.wait_for(lambda: Parrot.closed == [1])
