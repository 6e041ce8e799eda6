"""A client that asks and does not read costs the server no more than what it may send ahead; then it has to read.

One that never reads is disconnected. All of it holds on the bare transport, on plain ASGI, with `OPENENV_FAST=0` and
under a uvicorn that knows nothing of us.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from environments import Idle
from openenv.protocol.frames import FrameReader, Opcode, masked_text_frame
from openenv.server import slow_clients
from openenv.server.app import HTTPEnvServer, new_application
from openenv.server.sessions.lifetime import SessionLimits
from openenv.types import Action, Observation, State
from servers import RunningServer, Serve
from waiting import wait_until

KEY = bytes(4)
LARGE = "x" * 100_000
MB = 1024 * 1024
MOST_UNREAD = 24 * MB


class Ask(Action):
    large: bool = True
    size: int = 0
    text: str = ""


class Answer(Observation):
    text: str = ""
    count: int = 0


class Talkative(Idle):
    """Answers at length, and counts."""

    steps = 0
    states = 0
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
        return Answer(text="x" * action.size if action.size else LARGE if action.large else "", count=self._count)

    @property
    def state(self) -> State:
        with self.lock:
            type(self).states += 1
        return State(step_count=1, blob="y" * MB)  # type: ignore[call-arg]


class Raw:
    """A client that decides itself when it reads."""

    def __init__(self, connection: socket.socket, protocol: str = "openenv.v2.json") -> None:
        self.connection = connection
        self._reader = FrameReader(1 << 30, masked=False)
        self._messages: list[dict[str, Any]] = []
        self.closed: int | None = None
        connection.sendall(
            b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            + (f"Sec-WebSocket-Protocol: {protocol}\r\n".encode() if protocol else b"")
            + b"\r\n"
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

    def read_to_the_end(self) -> bytes:
        """Read until the server hangs up; return the payload of its close frame, if there is one."""
        closing = b""
        with suppress(ConnectionError):
            while data := self.connection.recv(1 << 20):
                closing = next((one.payload for one in self._reader.feed(data) if one.opcode == Opcode.CLOSE), closing)
        return closing


def connected(server: Any) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    return connection


Dial = Callable[..., Raw]


@pytest.fixture
def dial() -> Iterator[Dial]:
    with ExitStack() as stack:

        def dial(server: Any, protocol: str = "openenv.v2.json") -> Raw:
            return Raw(stack.enter_context(connected(server)), protocol)

        yield dial


WAYS = [
    "on the transport",
    "on ASGI",
    "without the fast path",
    pytest.param("uvicorn", marks=pytest.mark.slow),
    pytest.param("uvicorn with h11", marks=pytest.mark.slow),
]


@pytest.fixture(params=WAYS)
def server(request: pytest.FixtureRequest, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    Talkative.steps = Talkative.states = 0
    way, settings = request.param, {}
    if way == "on ASGI":
        monkeypatch.setattr("openenv.server.fast.frame_socket.take_over", lambda receive, max_size: None)
        monkeypatch.setattr("openenv.server.fast.dispatch.DirectDispatch.endpoint", lambda self, scope: None)
    elif way == "without the fast path":
        monkeypatch.setenv("OPENENV_FAST", "0")
    elif way != "on the transport":
        settings = {"http": "h11" if "h11" in way else "httptools", "ws": "auto"}
    limits = SessionLimits(sessions=16)
    app = new_application()
    app.state.openenv_server = HTTPEnvServer(Talkative, Ask, Answer, limits=limits, max_unread_bytes=MOST_UNREAD)
    app.state.openenv_server.register_routes(app)
    return serve(app, **settings)


def test_steps_that_are_sent_ahead_are_not_all_run_for_a_client_that_does_not_read(
    server: RunningServer, dial: Dial
) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    assert peer.take()["type"] == "opened"
    count = 600
    peer.send(*({"type": "step", "id": number, "data": {}} for number in range(1, count + 1)))
    server.wait_for(lambda: Talkative.steps > 0)
    assert settled(server, lambda: Talkative.steps) < count / 2
    replies = [peer.take() for _ in range(count)]
    assert [reply["id"] for reply in replies] == list(range(1, count + 1))
    assert [reply["data"]["observation"]["count"] for reply in replies] == list(range(1, count + 1))


def test_replies_that_are_kept_are_not_all_sent_again_to_a_client_that_does_not_read(
    server: RunningServer, dial: Dial
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


@pytest.mark.parametrize("batches", [0, 5], ids=["single", "in batches"])
def test_repeats_of_a_running_step_are_not_all_read_ahead(server: RunningServer, dial: Dial, batches: int) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    session = server.manager.slots.lookup(peer.take()["session"])[0]
    step = {"type": "step", "id": 1, "data": {"large": False}}
    count = 600
    messages: list[dict[str, Any]] = [step] * count
    if batches:
        messages = [{"type": "batch", "id": n, "requests": [step] * (count // batches)} for n in range(2, 2 + batches)]
    with Talkative.lock:  # the first step does not end
        peer.send(step, *messages)
        server.wait_for(lambda: session.ledger.hits > 0)
        assert settled(server, lambda: session.ledger.hits) < count / 2
    replies = [peer.take() for _ in range(1 + len(messages))]
    single = [one for reply in replies for one in reply.get("replies", [reply])]
    assert [reply["data"]["observation"]["count"] for reply in single] == [1] * (count + 1)
    assert Talkative.steps == 1
    peer.send({"type": "step", "id": 2, "data": {"large": False}})
    assert peer.take()["data"]["observation"]["count"] == 2


def test_a_client_that_reads_late_still_gets_everything_in_order(server: RunningServer, dial: Dial) -> None:
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


def test_a_client_that_leaves_without_reading_leaves_nothing_behind(server: RunningServer, dial: Dial) -> None:
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


def is_served(server: Any, dial: Dial) -> bool:
    """Say whether another client gets its replies."""
    other = dial(server)
    other.send({"type": "open", "id": 1})
    assert other.take()["type"] == "opened"
    other.send({"type": "step", "id": 1, "data": {"large": False}})
    reply = other.take()
    other.send({"type": "close", "id": 2})
    other.take()
    return reply["type"] == "observation"


def settled(server: Any, count: Callable[[], int]) -> int:
    """Wait until a count has stopped to grow."""
    counts: deque[int] = deque(maxlen=20)

    def is_settled() -> bool:
        counts.append(count())
        return len(counts) == counts.maxlen and len(set(counts)) == 1

    wait_until(is_settled, every_s=0.02)
    return counts[-1]


def test_large_replies_that_nobody_reads_are_not_made(server: RunningServer, dial: Dial) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    peer.take()
    count = 40  # fewer than may be sent ahead
    peer.send(*({"type": "step", "id": number, "data": {"size": MB}} for number in range(1, count + 1)))
    server.wait_for(lambda: Talkative.steps > 0)
    assert settled(server, lambda: Talkative.steps) <= 16  # what the system's buffers hold, and one or two more
    assert is_served(server, dial)
    replies = [peer.take() for _ in range(count)]
    assert [reply["data"]["observation"]["count"] for reply in replies] == list(range(1, count + 1))


def socket_buffers() -> int:
    """Return how much the kernel may hold between two ends: a busy machine lets its buffers grow to their limits."""
    limits = (Path("/proc/sys/net/ipv4") / name for name in ("tcp_rmem", "tcp_wmem"))
    return sum(int(limit.read_text().split()[2]) for limit in limits)


def test_large_requests_are_not_all_read_ahead(server: RunningServer, dial: Dial) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    peer.take()
    gate = Talkative.lock
    peer.connection.settimeout(1)
    sent = 0
    with gate, pytest.raises(TimeoutError):  # the first step does not end
        for number in range(1, 100):
            peer.send({"type": "step", "id": number, "data": {"text": "x" * 4 * MB, "large": False}})
            sent = number
    assert sent * 4 * MB <= 16 * MB + socket_buffers() + 8 * MB  # and a message on each side that is on its way
    peer.connection.close()


def test_a_session_whose_replies_were_held_back_goes_on_elsewhere(server: RunningServer, dial: Dial) -> None:
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    token = peer.take()["token"]
    peer.send(*({"type": "step", "id": number, "data": {"size": MB}} for number in range(1, 101)))
    server.wait_for(lambda: Talkative.steps > 0)
    assert settled(server, lambda: Talkative.steps) < 100
    other = dial(server)
    other.send({"type": "open", "id": 1, "resume": token})
    last = other.take()["last_id"]
    server.wait_for(lambda: Talkative.steps >= last)
    other.send({"type": "step", "id": last, "data": {"size": MB}})
    assert other.take()["data"]["observation"]["count"] == last
    other.send({"type": "step", "id": last + 1, "data": {"large": False}})
    assert other.take()["data"]["observation"]["count"] == last + 1


@pytest.mark.parametrize("protocol", ["openenv.v2.json", ""], ids=["v2", "v1"])
def test_a_client_that_never_reads_is_disconnected_and_its_session_is_kept(
    server: RunningServer, dial: Dial, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 0.5)
    peer = dial(server, protocol)
    requests: list[dict[str, Any]] = [{"type": "step", "data": {"size": 4 * MB}} for _ in range(20)]
    token = ""
    if protocol:
        peer.send({"type": "open", "id": 1})
        token = peer.take()["token"]
        requests = [{**request, "id": number} for number, request in enumerate(requests, 1)]
    peer.send(*requests)
    server.wait_for(lambda: Talkative.steps > 0)
    server.wait_for(lambda: not unread_sockets(server))
    assert is_served(server, dial)
    if protocol:
        other = dial(server)
        other.send({"type": "open", "id": 1, "resume": token})
        assert other.take()["resumed"] is True
    else:
        server.wait_for(lambda: server.manager.active == 0)


def unread_sockets(server: Any) -> list[int]:
    """Return how much each client has not read, as far as that is more than a reply of a usual size."""
    transports = [getattr(one, "_transport", None) or one.transport for one in server.server.server_state.connections]
    return [size for size in (one.get_write_buffer_size() for one in transports) if size > MB]


def test_clients_that_do_not_read_leave_no_more_than_the_limit_all_together(
    server: RunningServer, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.server.fast.frame_socket.CLOSE_TIMEOUT_S", 3600)  # no memory waits for a close frame
    peers = []
    for number in range(8):
        peer = dial(server)
        peer.send({"type": "open", "id": 1})
        peer.take()
        peer.send(*({"type": "step", "id": n, "data": {"size": 5 * MB}} for n in (1, 2, 3)))
        server.wait_for(lambda number=number: Talkative.steps > number)
        peers.append(peer)
    server.wait_for(lambda: sum(unread_sockets(server)) <= MOST_UNREAD)
    assert 0 < len(unread_sockets(server)) < 8


def test_a_response_that_nobody_reads_is_dropped(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 0.5)
    with connected(server) as peer:
        peer.sendall(b"POST /reset HTTP/1.1\r\nHost: x\r\nX-OpenEnv-Session: new\r\nContent-Length: 0\r\n\r\n")
        head = peer.recv(65_536)
        name = re.search(rb"x-openenv-session: (\S+)", head, re.IGNORECASE)[1]  # type: ignore[index]
        request = b"GET /state HTTP/1.1\r\nHost: x\r\nX-OpenEnv-Session: " + name + b"\r\n\r\n"
        peer.sendall(request * 40)
        server.wait_for(lambda: Talkative.states > 0)
        assert settled(server, lambda: Talkative.states) < 20
        server.wait_for(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize("server", ["on the transport"], indirect=True)
def test_a_client_that_begins_to_read_again_learns_why_it_was_disconnected(
    server: RunningServer, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 0.5)
    peer = dial(server)
    peer.send({"type": "open", "id": 1})
    peer.take()
    peer.send({"type": "step", "id": 1, "data": {"size": 8 * MB}})
    server.wait_for(lambda: bool(unread_sockets(server)))
    server.wait_for(lambda: any(one._socket._closing for one in server.server.server_state.connections))
    assert peer.read_to_the_end() == (1008).to_bytes(2, "big") + b"nothing was read for 0.5 s"
