"""Requests that have begun and do not end: what is held of them is bounded for all clients together, and in time."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from environments import Idle
from openenv.protocol.frames import FrameReader, Opcode, masked_frame, masked_text_frame
from openenv.server import slow_clients
from openenv.server.app import create_app
from openenv.server.runners import loop_local
from openenv.server.slow_clients import PartialRequests
from openenv.types import Action, Observation
from servers import Serve

MB = 1024 * 1024
KEY = bytes(4)
LARGEST = 4 * MB
LIMIT = 2 * LARGEST
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: openenv.v2.json\r\n\r\n"
)


class Say(Action):
    text: str = ""


class Gated(Idle):
    """Steps when it may."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    gate = threading.Event()

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        assert self.gate.wait(60)
        return Observation()


@pytest.fixture
def server(serve: Serve) -> Iterator[Any]:
    Gated.gate.set()
    app = create_app(
        Gated, Say, Observation, max_concurrent_envs=16, max_message_bytes=LARGEST, max_unread_bytes=1, runner="thread"
    )
    yield serve(app)
    Gated.gate.set()


Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(server: Any) -> Iterator[Connect]:
    with ExitStack() as stack:

        def connect() -> socket.socket:
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            peer.settimeout(30)
            return peer

        yield connect


def upgraded(peer: socket.socket) -> socket.socket:
    peer.sendall(UPGRADE)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += peer.recv(1)
    assert b" 101 " in head
    return peer


def step(size: int, number: int = 1) -> bytes:
    text = json.dumps({"type": "step", "id": number, "data": {"text": "x" * size}})
    return masked_text_frame(text.encode(), KEY)


def fragments(size: int) -> bytes:
    return masked_frame(0x01, b" " * size, KEY)


def body(size: int) -> bytes:
    return b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (size + 10) + b" " * size


def replies(peer: socket.socket, count: int) -> list[Any]:
    """Read text messages as JSON, and close frames as they are, until there are enough or the server hangs up."""
    reader = FrameReader(1 << 30, masked=False)
    found: list[Any] = []
    with suppress(ConnectionError):
        while len(found) < count and (data := peer.recv(1 << 16)):
            for message in reader.feed(data):
                if message.opcode == Opcode.TEXT:
                    found.append(json.loads(message.payload))
                elif message.opcode == Opcode.CLOSE:
                    found.append(message.payload)
    return found


def partial(server: Any) -> PartialRequests:
    return loop_local(server.server.servers[0].get_loop(), PartialRequests)


def held(server: Any) -> int:
    return partial(server).size


def largest(server: Any) -> int:
    return max((request.size for request in list(partial(server)._requests.values())), default=0)


def settled(server: Any) -> int:
    """Wait until no more is read."""
    last, same = 0, 0
    for _ in range(500):
        threading.Event().wait(0.02)
        same = same + 1 if held(server) == last > 0 else 0
        last = held(server)
        if same == 20:
            return last
    raise AssertionError("it goes on reading, or holds nothing")


@pytest.mark.parametrize("kind", ["a frame", "fragments", "a body"])
def test_all_requests_that_are_not_whole_share_a_limit(server: Any, connect: Connect, kind: str) -> None:
    peers = []
    for number in range(6):
        peer = connect() if kind == "a body" else upgraded(connect())
        size = 3 * MB + number * 20_000
        sent = {"a frame": step(size)[:-10], "fragments": fragments(size), "a body": body(size)}[kind]
        with suppress(ConnectionError):
            peer.sendall(sent)
        peers.append(peer)
        server.wait_for(lambda size=size: largest(server) >= size)
        assert held(server) <= LIMIT
    for peer in peers[1:5]:  # each of them the largest, when the next one came
        reason = f"all clients together sent more than {LIMIT} bytes of unfinished requests".encode()
        assert replies(peer, 1) == ([] if kind == "a body" else [(1008).to_bytes(2, "big") + reason])
    for number, peer in ((0, peers[0]), (5, peers[5])):
        end = {"a frame": step(3 * MB + number * 20_000)[-10:], "fragments": masked_frame(0x80, b"", KEY)}
        peer.sendall(end.get(kind, b" " * 10))
        if kind == "a body":
            assert peer.recv(12) == b"HTTP/1.1 422"  # an answer: the body is blank
        else:
            assert replies(peer, 1)[0]["type"] == "error"  # likewise: no session is open
    server.wait_for(lambda: held(server) == 0)


def test_a_request_of_the_largest_size_passes_however_it_comes(server: Any, connect: Connect) -> None:
    peer = upgraded(connect())
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(masked_text_frame(b'{"type":"open","id":1}', KEY))
    assert replies(peer, 1)[0]["type"] == "opened"
    request = step(LARGEST - 100)
    for start in range(0, 20_000, 7):
        peer.sendall(request[start : min(start + 7, 20_000)])
    peer.sendall(request[20_000:])
    assert replies(peer, 1)[0]["type"] == "observation"
    assert held(server) == 0


def test_a_request_that_comes_no_further_is_dropped(
    server: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 0.4)
    small, large, web = upgraded(connect()), upgraded(connect()), connect()
    small.sendall(step(1000)[:-10])
    large.sendall(step(MB)[:-10])
    web.sendall(body(MB))
    assert replies(large, 1) == [(1008).to_bytes(2, "big") + b"a request came no further for 0.4 s"]
    assert web.recv(1) == b""
    server.wait_for(lambda: 0 < held(server) < 10_000)
    small.sendall(step(1000)[-10:])
    assert replies(small, 1)[0]["type"] == "error"  # an answer: no session is open


def test_a_request_that_the_server_does_not_read_on_is_kept(
    server: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 2.0)  # on a busy machine, the sender pauses too
    monkeypatch.setattr(slow_clients, "_SMALL_REQUEST", 0)
    Gated.gate.clear()
    peer = upgraded(connect())
    peer.sendall(masked_text_frame(b'{"type":"open","id":1}', KEY))
    replies(peer, 1)
    count = 12  # more than are read while the first one runs
    sending = threading.Thread(target=peer.sendall, args=(b"".join(step(2 * MB, n) for n in range(1, count + 1)),))
    sending.start()
    before = settled(server)
    threading.Event().wait(2.6)
    assert held(server) == before > 0
    Gated.gate.set()
    assert [reply["id"] for reply in replies(peer, count)] == list(range(1, count + 1))
    sending.join(30)
