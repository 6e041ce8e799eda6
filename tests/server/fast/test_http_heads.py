"""The head of a request has an end: neither its size nor its time is the client's to choose, token or not."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from environments import Idle
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.fast import http as fast_http
from openenv.types import Action, Observation
from servers import RunningServer, Serve
from slow_steps import take

Connect = Callable[[Any], socket.socket]


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    return serve(application())


def application() -> Any:
    return create_app(Idle, Action, Observation, access=AccessPolicy(orchestrator="secret"))


@pytest.fixture(params=["fast", "OPENENV_FAST=0", "uvicorn with httptools", "uvicorn with h11"])
def any_server(request: pytest.FixtureRequest, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "OPENENV_FAST=0":
        monkeypatch.setenv("OPENENV_FAST", "0")
    elif request.param != "fast":
        return serve(application(), http=request.param.rpartition(" ")[2], ws="auto")
    return serve(application())


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:

        def connect(server: Any) -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))

        yield connect


def everything(connection: socket.socket) -> bytes:
    """Read until the server hangs up."""
    found = b""
    while True:
        try:
            data = connection.recv(65_536)
        except ConnectionError:  # it has hung up on what it did not want to read
            return found
        if not data:
            return found
        found += data


def send_most(connection: socket.socket, piece: bytes, count: int) -> int:
    """Send a piece again and again until the server hangs up; return how often that went well."""
    for sent in range(count):
        try:
            connection.sendall(piece)
        except ConnectionError:
            return sent
    return count


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"X-A: " + b"a" * 8192 + b"\r\n"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ", b"a" * 8192),
        (b"GET /", b"a" * 8192),
        (b"POST /reset HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: ", b"a" * 8192),
    ],
    ids=["many fields", "an endless field", "an endless address", "an endless trailer"],
)
def test_a_head_without_end_is_refused_before_it_fills_the_memory(
    server: RunningServer, connect: Connect, start: bytes, piece: bytes
) -> None:
    connection = connect(server)
    connection.sendall(start)
    sent = send_most(connection, piece, 4096)
    assert sent < 4096  # 32 MB; what the sockets hold by themselves is less
    everything(connection)


def test_a_request_head_that_is_too_large_is_refused_with_the_reason(server: RunningServer, connect: Connect) -> None:
    connection = connect(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    for _ in range(5):
        connection.sendall(b"X-A: " + b"a" * 16_384 + b"\r\n")
    assert everything(connection).startswith(b"HTTP/1.1 431 ")


def test_large_heads_within_the_limit_and_requests_after_them_are_served(
    server: RunningServer, connect: Connect
) -> None:
    connection = connect(server)
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: " + b"a" * 30_000 + b"\r\n"
    for last in (False, False, False, True):
        connection.sendall(head[:10_000])
        connection.sendall(head[10_000:] + (b"Connection: close\r\n\r\n" if last else b"\r\n"))
    assert everything(connection).count(b"HTTP/1.1 200 OK") == 4


def test_a_body_in_many_small_chunks_is_no_head(server: RunningServer, connect: Connect) -> None:
    connection = connect(server)
    connection.sendall(
        b"POST /reset HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"2\r\n  \r\n" * 50_000 + b"0\r\n\r\n"
    )
    assert everything(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A:", b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\n"],
    ids=["nothing", "an address", "a field", "an upgrade"],
)
def test_a_connection_whose_request_does_not_come_is_closed(
    server: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(fast_http, "HEAD_TIMEOUT_S", 0.2)
    connection = connect(server)
    connection.sendall(begun)
    everything(connection)  # or the time of the test's socket is over


def test_the_next_request_of_a_connection_has_the_same_time(
    server: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_http, "HEAD_TIMEOUT_S", 1.5)
    connection = connect(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.recv(65_536).startswith(b"HTTP/1.1 200 OK")
    connection.sendall(b"GET /hea")
    everything(connection)


def test_a_request_that_takes_long_is_not_cut_off_by_the_time_for_its_head(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Slow(Idle):
        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            take(2.0)
            return Observation()

    monkeypatch.setattr(fast_http, "HEAD_TIMEOUT_S", 1.5)
    connection = connect(serve(create_app(Slow, Action, Observation)))
    connection.sendall(b"POST /reset HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-")
    connection.sendall(b"Length: 0\r\n\r\n")
    assert everything(connection).startswith(b"HTTP/1.1 200 OK")


# -- before anything of it is handled, on every path ----------------------------------------------------------------

UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nAuthorization: Bearer secret\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
MANY_FIELDS = b"".join(b"X-%d: a\r\n" % n for n in range(300))
HEADS = {
    "one long field": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-A: " + b"a" * 100_000 + b"\r\n",
    "many fields": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + MANY_FIELDS,
    "a long address": b"GET /health?" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n",
    "an upgrade with a long field": UPGRADE + b"X-A: " + b"a" * 100_000 + b"\r\n",
    "an upgrade with many fields": UPGRADE + MANY_FIELDS,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_whole_head_over_the_limit_is_refused_however_it_is_read(
    any_server: Any, connect: Connect, head: bytes, request: pytest.FixtureRequest
) -> None:
    is_uvicorns = "uvicorn" in request.node.callspec.id
    if is_uvicorns and b"Upgrade" in head:
        pytest.skip("uvicorn's WebSocket protocol gets these first, and never answers them")
    connection = connect(any_server)
    connection.sendall(head + b"\r\n")
    status = everything(connection)[:13]
    # uvicorn's HTTP protocols refuse some heads by themselves, with a status of theirs.
    assert status in ((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ") if is_uvicorns else (b"HTTP/1.1 431 ",)), status


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_it_is_refused_behind_another_request_too(server: RunningServer, connect: Connect, head: bytes) -> None:
    connection = connect(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + head + b"\r\n")
    answer = everything(connection)
    assert answer.count(b" 200 OK") <= 1
    assert b"HTTP/1.1 431 " in answer


def test_the_refusal_arrives_although_the_client_goes_on_sending(server: RunningServer, connect: Connect) -> None:
    connection = connect(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ")
    connection.sendall(b"a" * 4_000_000)
    assert everything(connection).startswith(b"HTTP/1.1 431 ")


def test_a_head_at_the_limit_is_served_and_a_body_is_not_counted(any_server: Any, connect: Connect) -> None:
    connection = connect(any_server)
    body = b" " * 300_000
    connection.sendall(
        b"POST /reset HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nConnection: close\r\n"
        + b"".join(b"X-%d: " % n + b"a" * 200 + b"\r\n" for n in range(200))
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )
    assert everything(connection).startswith(b"HTTP/1.1 200 OK")


def test_a_body_over_the_limit_is_still_413(any_server: Any, connect: Connect) -> None:
    any_server.app.state.openenv_server.reconfigure(max_message_bytes=1000)
    connection = connect(any_server)
    connection.sendall(
        b"POST /reset HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nConnection: close\r\n"
        b"Content-Length: 2000\r\n\r\n" + b" " * 2000
    )
    assert everything(connection).startswith(b"HTTP/1.1 413 ")
