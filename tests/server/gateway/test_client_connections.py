"""Connections through a gateway: where responses end, what is no request, what is not read."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

import http_calls
from gateways import ChangingBackends, RunningGateway
from openenv.server.gateway import client_connections
from openenv.server.gateway.client_connections import ResponseEnd
from waiting import wait_until

READY = b'{"active_sessions":0,"max_sessions":100}'


@pytest.mark.parametrize(
    ("raw", "to_head"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\n0\r\n\r\n0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nDate: x\r\n\r\n", False),
    ],
)
def test_the_end_of_a_response_is_found_wherever_reads_end(raw: bytes, to_head: bool) -> None:
    for size in (1, 7, len(raw)):
        end = ResponseEnd(to_head=to_head)
        pieces = [raw[begin : begin + size] for begin in range(0, len(raw), size)]
        assert [end.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_response_without_a_length_ends_with_its_connection() -> None:
    end = ResponseEnd(to_head=False)
    assert not end.feed(b"HTTP/1.1 200 OK\r\n\r\n")
    assert not end.feed(b"x" * 100_000)


class PlainServer:
    """A server that answers `/ready`, and leaves any other connection to the test."""

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.peers: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self.peers.append(peer)
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            while data := peer.recv(65536):
                if data.startswith(b"GET /ready"):
                    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                    peer.sendall(head % len(READY) + READY)
                else:
                    self._answer(peer, data)

    def close(self) -> None:
        """End it."""
        self._listener.close()
        for peer in self.peers:
            peer.close()


@pytest.fixture
def behind(start: Callable[..., RunningGateway]) -> Iterator[Callable[..., RunningGateway]]:
    """Start a gateway in front of a `PlainServer`."""
    servers: list[PlainServer] = []

    def begin(answer: Callable[[socket.socket, bytes], None]) -> RunningGateway:
        servers.append(PlainServer(answer))
        return start(source=ChangingBackends([servers[-1].url]))

    yield begin
    for server in servers:
        server.close()


def exchange(gateway: RunningGateway, data: bytes) -> bytes:
    """Send bytes, and return everything that comes until the connection ends."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as raw:
        raw.sendall(data)
        received = b""
        while chunk := raw.recv(65536):
            received += chunk
        return received


def never(peer: socket.socket, data: bytes) -> None:
    raise AssertionError(data)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02", b"GET  / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 700_000, b"hello\r\n\r\n"],
)
def test_what_is_no_request_is_refused(behind: Callable[..., RunningGateway], data: bytes) -> None:
    answer = exchange(behind(never), data)
    status, code = (b"431", b"HEAD_TOO_LARGE") if len(data) > 65_536 else (b"400", b"BAD_REQUEST")
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert code in answer


def test_a_response_that_ends_with_its_connection_arrives_whole(behind: Callable[..., RunningGateway]) -> None:
    def answer(peer: socket.socket, data: bytes) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300_000)
        peer.shutdown(socket.SHUT_RDWR)

    whole = exchange(behind(answer), b"GET /log HTTP/1.1\r\nHost: x\r\n\r\n")
    assert len(whole.partition(b"\r\n\r\n")[2]) == 300_000


def test_a_server_that_goes_before_its_response_ends_the_clients_connection(
    behind: Callable[..., RunningGateway],
) -> None:
    gateway = behind(lambda peer, data: peer.shutdown(socket.SHUT_RDWR))
    assert exchange(gateway, b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n") == b""


def test_an_answer_before_the_end_of_a_request_reaches_the_client(behind: Callable[..., RunningGateway]) -> None:
    answered = threading.Event()

    def answer(peer: socket.socket, data: bytes) -> None:
        if not answered.is_set():
            answered.set()
            peer.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")

    gateway = behind(answer)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as raw:
        raw.sendall(b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 100_000)
        assert raw.recv(65536).startswith(b"HTTP/1.1 413")
        raw.sendall(b"x" * 100_000 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while chunk := raw.recv(65536):
            received += chunk
        assert b"healthy" in received  # the rest of the first request was no request


@pytest.mark.parametrize("is_socket", [False, True])
def test_a_client_that_does_not_read_stops_its_server_and_not_the_memory_of_the_gateway(
    behind: Callable[..., RunningGateway], is_socket: bool
) -> None:
    total = 64 * 1024 * 1024
    sent = [0]

    def answer(peer: socket.socket, data: bytes) -> None:
        head = b"HTTP/1.1 101 Switching Protocols\r\n\r\n" if is_socket else b"HTTP/1.1 200 OK\r\n\r\n"
        peer.sendall(head)
        while sent[0] < total:
            sent[0] += peer.send(b"x" * 65536)

    gateway = behind(answer)
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\n" if is_socket else b""
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        raw.settimeout(30)
        raw.connect(("127.0.0.1", gateway.port))
        raw.sendall(b"GET /ws HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
        seen = -1

        def is_stalled() -> bool:
            nonlocal seen
            before, seen = seen, sent[0]
            threading.Event().wait(0.2)
            return before == seen > 0

        wait_until(is_stalled)
        assert seen < total // 2
        held = gateway.call(unread(gateway))
        assert held < 2 * 1024 * 1024
        received = 0
        while received < total:  # and it goes on as soon as the client does
            received += len(raw.recv(1 << 20))


def test_requests_sent_ahead_wait_while_their_client_does_not_read(behind: Callable[..., RunningGateway]) -> None:
    answered = [0]

    def answer(peer: socket.socket, data: bytes) -> None:
        for _ in range(data.count(b"GET /log")):
            answered[0] += 1
            peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000)

    gateway = behind(answer)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        raw.settimeout(30)
        raw.connect(("127.0.0.1", gateway.port))
        raw.sendall(b"GET /log HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        wait_until(lambda: answered[0] > 0)
        threading.Event().wait(0.5)
        assert answered[0] < 15  # what fits into the buffers of the system
        received = 0
        while received < 20_000_000:
            received += len(raw.recv(1 << 20))
    assert answered[0] == 20


async def unread(gateway: RunningGateway) -> int:
    connections = (*gateway.gateway.relays, *gateway.gateway.sockets)
    return sum(one.transport.get_write_buffer_size() for one in connections)


def test_a_connection_that_says_nothing_ends(
    behind: Callable[..., RunningGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connections, "HEAD_TIMEOUT_S", 0.2)
    gateway = behind(never)
    assert exchange(gateway, b"") == exchange(gateway, b"GET /ws HTT") == b""
    wait_until(lambda: not gateway.gateway.relays)


def test_a_client_that_leaves_during_the_handshake_leaves_nothing(behind: Callable[..., RunningGateway]) -> None:
    gone = threading.Event()

    def answer(peer: socket.socket, data: bytes) -> None:
        assert peer.recv(1) == b""  # the gateway has closed its connection
        gone.set()

    gateway = behind(answer)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as raw:
        upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Protocol: openenv.v2.json\r\n"
        raw.sendall(b"GET /ws HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
        wait_until(lambda: any(one._servers for one in list(gateway.gateway.relays)))
    assert gone.wait(30)
    wait_until(lambda: not gateway.gateway.relays and not gateway.gateway.sockets)
    assert http_calls.get(f"{gateway.url}/health").status_code == 200
