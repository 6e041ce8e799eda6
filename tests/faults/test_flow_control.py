"""What one client does or fails to do must not cost the others: dead peers, peers that do not read, senders ahead."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from websockets.sync.client import ClientConnection, connect

from environments import Idle
from openenv.protocol.frames import masked_text_frame
from openenv.server.app import HTTPEnvServer
from openenv.server.fast.frame_socket import KeepAlive
from openenv.server.sessions.lifetime import SessionLimits
from openenv.types import Action, Observation, State
from servers import Serve
from slow_steps import take, take_async
from waiting import holds_for


class Move(Action):
    """An action."""

    n: int = 0
    sleep_s: float = 0.0


class Seen(Observation):
    """An observation."""

    n: int = 0


class Plain(Idle):
    """An environment with a large state."""

    def reset(self, **_: Any) -> Seen:
        return Seen()

    def step(self, action: Move, **_: Any) -> Seen:
        take(action.sleep_s)
        return Seen(n=action.n)

    @property
    def state(self) -> State:
        return State(step_count=1, blob="y" * 20_000)  # type: ignore[call-arg]


class Gated(Plain):
    """An environment whose steps all end at one moment."""

    gate: asyncio.Event | None = None

    async def step_async(self, action: Move, **_: Any) -> Seen:
        type(self).gate = type(self).gate or asyncio.Event()
        await type(self).gate.wait()
        return Seen(n=action.n)


class Held(Plain):
    """An environment whose steps hold a thread until they are let go."""

    entered = threading.Event()
    gate = threading.Event()

    def step(self, action: Move, **_: Any) -> Seen:
        self.entered.set()
        self.gate.wait(60)
        return Seen(n=action.n)


class ClosesSlowly(Plain):
    """An environment that keeps its slot for a while after its session has ended."""

    async def close(self) -> None:  # type: ignore[override]
        await take_async(0.4)


class Compiled(Plain):
    """An environment whose `reset` has no signature to look at, like one of a compiled module."""

    reset = {}.update  # type: ignore[assignment]


def app_of(env: Any, *, sessions: int = 8, runner: str | None = None) -> FastAPI:
    """An application of an environment."""
    server = HTTPEnvServer(env, Move, Seen, limits=SessionLimits(sessions=sessions), runner=runner)
    app = FastAPI()
    app.state.openenv_server = server
    server.register_routes(app)
    return app


def dial(server: Any) -> ClientConnection:
    """A client that offers no compression, so that the connection is taken over."""
    return connect(f"ws://127.0.0.1:{server.port}/ws", compression=None).__enter__()


def raw(server: Any) -> socket.socket:
    """A bare socket after the handshake."""
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    peer.sendall(f"{head}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
    while b"\r\n\r\n" not in peer.recv(4096):
        pass
    return peer


def frame(message: dict[str, Any]) -> bytes:
    """A masked frame."""
    return masked_text_frame(json.dumps(message).encode(), b"key!")


def test_a_connection_that_dies_costs_no_other_client_its_reply(serve: Serve) -> None:
    Gated.gate = None
    server = serve(app_of(Gated))
    dying, healthy = dial(server), dial(server)
    try:
        for number, client in enumerate((dying, healthy)):
            client.send(json.dumps({"type": "step", "data": {"n": number}}))
        server.wait_for(lambda: Gated.gate is not None and server.manager.active == 2)
        holds_for(0.1, lambda: server.manager.active == 2)
        port = dying.local_address[1]
        connection = next(
            c for c in server.server.server_state.connections if c._transport.get_extra_info("peername")[1] == port
        )

        async def end_both_in_one_pass() -> None:
            assert Gated.gate is not None
            Gated.gate.set()
            connection._transport.abort()

        loop = connection._loop
        asyncio.run_coroutine_threadsafe(end_both_in_one_pass(), loop).result(30)
        assert json.loads(healthy.recv(timeout=30))["data"]["observation"]["n"] == 1
    finally:
        dying.close()
        healthy.close()


def test_a_client_that_never_reads_is_not_read_from_for_ever(serve: Serve) -> None:
    server = serve(app_of(Plain))
    peer = raw(server)
    peer.settimeout(1.0)
    burst, sent = frame({"type": "state"}) * 500, 0
    with pytest.raises(TimeoutError):
        while sent < 4_000_000:
            sent += peer.send(burst)
    connection = next(iter(server.server.server_state.connections))
    assert connection._transport.get_write_buffer_size() < 4_000_000
    peer.close()
    server.wait_for(lambda: server.manager.active == 0)


def test_a_message_over_the_limit_is_refused_in_its_turn(serve: Serve) -> None:
    app = app_of(Plain)
    app.state.openenv_server.service.options = _with_limit(app, 1000)
    client = dial(serve(app))
    client.send(json.dumps({"type": "step", "data": {"n": 7, "sleep_s": 0.3}}))
    client.send(json.dumps({"type": "step", "data": {"n": 8, "metadata": {"x": "y" * 5000}}}))
    client.send(json.dumps({"type": "step", "data": {"n": 9}}))
    replies = [json.loads(client.recv(timeout=30)) for _ in range(3)]
    client.close()
    assert [reply["type"] for reply in replies] == ["observation", "error", "observation"]
    assert replies[2]["data"]["observation"]["n"] == 9


def _with_limit(app: FastAPI, limit: int) -> Any:
    from dataclasses import replace

    return replace(app.state.openenv_server.service.options, max_message_bytes=limit)


def test_a_thousand_requests_sent_ahead_are_answered_without_recursion(serve: Serve) -> None:
    server = serve(app_of(ClosesSlowly, sessions=1, runner="inline"))
    first = dial(server)
    first.send('{"type":"reset"}')
    first.recv(timeout=30)
    first.close()
    peer = raw(server)
    peer.sendall(frame({"type": "reset"}) * 1000)
    got = b""
    while got.count(b'"type":"observation"') < 1000:
        data = peer.recv(1 << 20)
        assert data, "the connection was lost"
        got += data
    peer.close()


def test_an_environment_that_hides_its_signature_is_served_and_freed(serve: Serve) -> None:
    server = serve(app_of(Compiled))
    client = dial(server)
    client.send(json.dumps({"type": "step", "data": {"n": 3}}))
    assert json.loads(client.recv(timeout=30))["data"]["observation"]["n"] == 3
    client.close()
    server.wait_for(lambda: server.manager.active == 0)


def test_a_broken_connection_does_not_end_the_watch_over_the_others() -> None:
    class Peer:
        def __init__(self, *, broken: bool) -> None:
            self.last_heard = -1000.0
            self.broken = broken
            self.aborted = asyncio.Event()

        can_be_heard = True

        def ping(self) -> None:
            if self.broken:
                raise RuntimeError("cannot write any more")

        def abort(self) -> None:
            self.aborted.set()

    async def main() -> None:
        watch = KeepAlive(asyncio.get_running_loop(), interval_s=0.02, timeout_s=0.02)
        broken, silent = Peer(broken=True), Peer(broken=False)
        watch.add(broken)
        watch.add(silent)
        await asyncio.wait_for(asyncio.gather(broken.aborted.wait(), silent.aborted.wait()), 30)
        watch.discard(silent)

    asyncio.run(main())


def test_a_client_that_sent_far_ahead_and_vanished_is_noticed_while_its_step_runs(serve: Serve) -> None:
    Held.entered.clear()
    Held.gate.clear()
    server = serve(app_of(Held))
    peer = raw(server)
    peer.sendall(frame({"type": "step", "data": {}}) * 51)
    assert Held.entered.wait(30)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    try:
        server.wait_for(lambda: [s.state.value for s in server.manager.sessions()] == ["closing"])
    finally:
        Held.gate.set()
    server.wait_for(lambda: server.manager.active == 0)


@pytest.mark.slow
def test_starlettes_test_client_ends_a_websocket_without_an_error() -> None:
    for _ in range(20):
        with TestClient(app_of(Plain)) as client, client.websocket_connect("/ws") as socket_:
            socket_.send_json({"type": "reset"})
            assert socket_.receive_json()["type"] == "observation"


@pytest.mark.parametrize("value", [None, (Seen(), 0.0, True, False, {}), 3, "text"])
def test_what_is_no_observation_is_an_error_and_never_a_step_without_reward(serve: Serve, value: Any) -> None:
    class Wrong(Plain):
        def step(self, action: Move, **_: Any) -> Any:
            return value

    client = dial(serve(app_of(Wrong)))
    client.send(json.dumps({"type": "step", "data": {}}))
    reply = json.loads(client.recv(timeout=30))
    client.close()
    assert reply["type"] == "error"
    assert "not an Observation" in reply["data"]["message"]


def test_those_who_wait_for_a_slot_are_woken_one_by_one(serve: Serve) -> None:
    server = serve(app_of(Plain, sessions=1))
    done: list[int] = []

    def request(number: int) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
            body = json.dumps({"action": {"n": number, "sleep_s": 0.01}})
            head = f"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            peer.sendall((head + body).encode())
            answer = b""
            while chunk := peer.recv(4096):
                answer += chunk
        if b" 200 " in answer:
            done.append(number)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert sorted(done) == list(range(40))
