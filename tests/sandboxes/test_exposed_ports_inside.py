"""A tunnel over standard streams: the relay runs as a process here, as it would in a sandbox."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openenv.sandboxes import exposed_ports as relay_module
from openenv.sandboxes.exposed_ports import StdioTunnel, relay_source
from openenv.sandboxes.exposed_ports_inside import CUT, DATA, HEAD, OPEN
from openenv.sandboxes.host import ConnectionQuota
from waiting import wait_until


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Path]:
    """A unix socket whose server sends everything back in capitals, and then closes."""
    path = tmp_path / "socket"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(64)
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    yield path
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def serve(server: socket.socket) -> None:
    while True:
        try:
            end, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=(end,), daemon=True).start()


def answer(end: socket.socket) -> None:
    with end:
        while data := end.recv(1 << 16):
            end.sendall(data.upper())


@pytest.fixture
def port(echo: Path, free_port: Callable[[], int]) -> Iterator[int]:
    """A loopback port that leads through a tunnel to the socket."""
    yield from tunnelled(echo, free_port())


def tunnelled(path: Path, port: int) -> Iterator[int]:
    relay = subprocess.Popen(
        [sys.executable, "-c", relay_source(), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    tunnel = StdioTunnel(path)
    threads = [threading.Thread(target=pour, args=(tunnel, relay)), threading.Thread(target=take, args=(tunnel, relay))]
    for thread in threads:
        thread.start()
    try:
        assert tunnel.ready.wait(20)
        yield port
    finally:
        tunnel.close()
        for thread in threads:
            thread.join(20)
        assert relay.wait(20) == 0


def pour(tunnel: StdioTunnel, relay: subprocess.Popen[bytes]) -> None:
    assert relay.stdin is not None
    for frames in tunnel.frames():
        relay.stdin.write(frames)
    relay.stdin.close()


def take(tunnel: StdioTunnel, relay: subprocess.Popen[bytes]) -> None:
    assert relay.stdout is not None
    while data := relay.stdout.read(1 << 16):
        tunnel.received("stdout", data)
    relay.stdout.close()


def ask(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as end:
        threading.Thread(target=send, args=(end, data), daemon=True).start()
        got = b""
        while part := end.recv(1 << 16):
            got += part
        return got


def send(end: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it may be closed already; what came through is what the tests look at
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)


def test_bytes_go_through_both_ways(port: int) -> None:
    data = bytes(range(256)) * 20_000
    assert ask(port, data) == data.upper()
    assert ask(port, b"") == b""


def test_many_connections_at_once_are_not_mixed_up(port: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        words = [f"connection {number} ".encode() * 1000 for number in range(40)]
        assert list(pool.map(lambda word: ask(port, word), words)) == [word.upper() for word in words]


def test_a_connection_without_a_destination_is_closed(tmp_path: Path, free_port: Callable[[], int]) -> None:
    for port in tunnelled(tmp_path / "missing", free_port()):
        assert ask(port, b"hello") == b""


def test_a_server_that_ends_its_half_still_receives_from_the_client(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    received: list[bytes] = []

    def greet(server: socket.socket) -> None:
        end, _ = server.accept()
        with end:
            end.sendall(b"hello")
            end.shutdown(socket.SHUT_WR)
            while data := end.recv(100):
                received.append(data)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        greeting = threading.Thread(target=greet, args=(server,), daemon=True)
        greeting.start()
        for port in tunnelled(tmp_path / "socket", free_port()):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                assert client.recv(100) == b"hello"
                assert client.recv(100) == b""
                client.sendall(b"late")
            greeting.join(20)
    assert received == [b"late"]


# What code in a sandbox may write into the tunnel


def test_no_frame_is_larger_than_what_a_relay_sends(echo: Path) -> None:
    """A header may announce 4 GB, which the host would have to keep until the frame is complete."""
    tunnel = StdioTunnel(echo)
    ended = threading.Event()

    def read_to_the_end() -> None:
        for _ in tunnel.frames():
            pass
        ended.set()

    threading.Thread(target=read_to_the_end, daemon=True).start()
    tunnel.received("stdout", HEAD.pack(DATA, 1, 0xFFFF_FFFF) + bytes(1000))
    assert ended.wait(20), "the tunnel is still open"


def test_no_connection_is_opened_twice(echo: Path) -> None:
    tunnel = StdioTunnel(echo)
    before = threading.active_count()
    tunnel.received("stdout", HEAD.pack(OPEN, 1, 0) + HEAD.pack(OPEN, 1, 0))
    wait_until(lambda: threading.active_count() <= before, 20, "a connection was left behind")


def test_a_tunnel_opens_no_more_connections_than_its_quota_allows(echo: Path) -> None:
    quota = ConnectionQuota(own=3, shared=0)
    tunnel = StdioTunnel(echo, quota)
    for number in range(50):
        tunnel.received("stdout", HEAD.pack(OPEN, number, 0))
    assert quota.held(tunnel) == 3
    frames = b"".join(itertools.islice(tunnel.frames(), 1))
    assert frames.count(HEAD.pack(CUT, 49, 0)) == 1
    neighbour = StdioTunnel(echo, quota)
    neighbour.received("stdout", HEAD.pack(OPEN, 1, 0) + HEAD.pack(DATA, 1, 5) + b"hello")
    assert next(neighbour.frames()) == HEAD.pack(DATA, 1, 5) + b"HELLO"
    tunnel.close()
    neighbour.close()
    wait_until(lambda: not (quota.held(tunnel) or quota.held(neighbour)), 20, "places are not given back")


def test_a_tunnel_opens_connections_no_faster_than_a_host_can_bear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_BURST", 10.0)
    monkeypatch.setattr(relay_module, "_RATE", 0.001)
    path = tmp_path / "counted"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(64)
        server.settimeout(0.2)
        tunnel = StdioTunnel(path)
        for number in range(40):
            tunnel.received("stdout", HEAD.pack(OPEN, number, 0) + HEAD.pack(CUT, number, 0))
        for _ in range(10):
            server.accept()[0].close()
        with pytest.raises(TimeoutError):
            server.accept()
        tunnel.close()
