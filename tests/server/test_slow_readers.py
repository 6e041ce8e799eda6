"""A client that asks and does not read costs the server no more than what it may send ahead; then it has to read."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from environments import Idle
from openenv.protocol.frames import FrameReader, Opcode, masked_text_frame
from openenv.server.app import HTTPEnvServer, new_application
from openenv.sessions.lifetime import SessionLimits
from openenv.types import Action, Observation

KEY = bytes(4)
LARGE = "x" * 100_000


class Ask(Action):
    large: bool = True


class Answer(Observation):
    text: str = ""
    count: int = 0


class Talkative(Idle):
    """Answers at length, and counts."""

    steps = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Answer:
        return Answer()

    def step(self, action: Ask, timeout_s: float | None = None, **kwargs: Any) -> Answer:
        with self.lock:
            type(self).steps += 1
        self._count += 1
        return Answer(text=LARGE if action.large else "", count=self._count)


class Raw:
    """A client that decides itself when it reads."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = FrameReader(1 << 30, masked=False)
        self._messages: list[dict[str, Any]] = []
        connection.sendall(
            b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: openenv.v2.json\r\n\r\n"
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        assert b" 101 " in head

    def send(self, *messages: dict[str, Any]) -> None:
        self.connection.sendall(b"".join(masked_text_frame(json.dumps(message).encode(), KEY) for message in messages))

    def take(self) -> dict[str, Any]:
        while not self._messages:
            data = self.connection.recv(1 << 20)
            assert data, "the server has hung up"
            found = self._reader.feed(data)
            self._messages += [json.loads(one.payload) for one in found if one.opcode == Opcode.TEXT]
        return self._messages.pop(0)


@pytest.fixture
def dial() -> Iterator[Callable[[Any], Raw]]:
    with ExitStack() as stack:

        def dial(server: Any) -> Raw:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", server.port))
            return Raw(stack.enter_context(connection))

        yield dial


@pytest.fixture(params=["on the transport", "on ASGI"])
def server(request: pytest.FixtureRequest, serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "on ASGI":
        monkeypatch.setattr("openenv.server.fast.frame_socket.take_over", lambda receive, max_size: None)
        monkeypatch.setattr("openenv.server.fast.dispatch.DirectDispatch.endpoint", lambda self, scope: None)
    Talkative.steps = 0
    app = new_application()
    app.state.openenv_server = HTTPEnvServer(Talkative, Ask, Answer, limits=SessionLimits(sessions=8))
    app.state.openenv_server.register_routes(app)
    return serve(app)


def test_steps_that_are_sent_ahead_are_not_all_run_for_a_client_that_does_not_read(
    server: Any, dial: Callable[[Any], Raw]
) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    assert peer.take()["type"] == "opened"
    count = 600
    peer.send(*({"type": "step", "id": number, "data": {}} for number in range(1, count + 1)))
    server.wait_for(lambda: Talkative.steps > 0)
    server.wait_for(lambda: all(session.is_idle for session in server.manager.sessions()))
    assert Talkative.steps < count / 2
    replies = [peer.take() for _ in range(count)]
    assert [reply["id"] for reply in replies] == list(range(1, count + 1))
    assert [reply["data"]["observation"]["count"] for reply in replies] == list(range(1, count + 1))


def test_replies_that_are_kept_are_not_all_sent_again_to_a_client_that_does_not_read(
    server: Any, dial: Callable[[Any], Raw]
) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    opened = peer.take()
    peer.send({"type": "step", "id": 1, "data": {}})
    assert peer.take()["data"]["observation"]["count"] == 1
    count = 600
    peer.send(*({"type": "step", "id": 1, "data": {}} for _ in range(count)))
    session = server.manager.slots.lookup(opened["session"])[0]
    server.wait_for(lambda: session.ledger.hits > 0)
    for _ in range(20):  # whatever it does with what it has read already, it has done by now
        assert session.ledger.hits < count / 2
        peer_is_served = dial(server)
        peer_is_served.send({"type": "ping", "id": 1})
        assert peer_is_served.take() == {"type": "pong", "id": 1}
    assert {peer.take()["id"] for _ in range(count)} == {1}
    assert Talkative.steps == 1
    peer.send({"type": "step", "id": 2, "data": {"large": False}})
    assert peer.take()["data"]["observation"]["count"] == 2


def test_a_client_that_reads_late_still_gets_everything_in_order(server: Any, dial: Callable[[Any], Raw]) -> None:
    peer = dial(server)
    peer.send(*({"type": "open", "id": number} for number in (1, 2, 3)))
    names = [peer.take()["session"] for _ in range(3)]
    numbers = range(1, 201)
    peer.send(
        *({"type": "step", "id": n, "session": name, "data": {"large": n % 50 == 0}} for n in numbers for name in names)
    )
    peer.send({"type": "ping", "id": 4})
    seen: dict[str, list[int]] = {name: [] for name in names}
    pongs = 0
    for _ in range(len(numbers) * 3 + 1):
        reply = peer.take()
        if reply["type"] == "pong":
            pongs += 1
        else:
            seen[reply["session"]].append(reply["data"]["observation"]["count"])
    assert pongs == 1
    assert all(counts == list(numbers) for counts in seen.values())


def test_a_client_that_leaves_without_reading_leaves_nothing_behind(server: Any, dial: Callable[[Any], Raw]) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    token = peer.take()["token"]
    peer.send(*({"type": "step", "id": number, "data": {}} for number in range(1, 301)))
    server.wait_for(lambda: Talkative.steps > 0)
    peer.connection.close()
    again = dial(server)
    again.send({"type": "open", "id": 1, "resume": token})
    last = again.take()["last_id"]
    server.wait_for(lambda: all(session.is_idle for session in server.manager.sessions()))
    again.send({"type": "step", "id": last + 1, "data": {"large": False}})
    assert again.take()["data"]["observation"]["count"] == last + 1
