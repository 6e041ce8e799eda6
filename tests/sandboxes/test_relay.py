"""The relay between listening sockets and unix sockets: half-closed, slow, broken and many connections."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openenv.sandboxes.relay import Relay

Talk = Callable[[socket.socket], None]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[Talk], Callable[[], socket.socket]]]:
    """Serve a unix socket behind a relay; yield a function that connects to its port."""
    relay = Relay()
    with contextlib.ExitStack() as stack:

        def expose(talk: Talk) -> Callable[[], socket.socket]:
            path = tmp_path / f"s{len(os.listdir(tmp_path))}"
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            server.listen(64)
            threading.Thread(target=serve, args=(server, talk), daemon=True).start()
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            stack.callback(relay.add(listener, path).close)
            return lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))

        yield expose


def serve(server: socket.socket, talk: Talk) -> None:
    while True:
        try:
            accepted, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=one, args=(accepted, talk), daemon=True).start()


def one(accepted: socket.socket, talk: Talk) -> None:
    with accepted, contextlib.suppress(OSError):
        talk(accepted)


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while data := connection.recv(65536):
        parts.append(data)
    return b"".join(parts)


def relay_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "openenv-relay"}


def test_bytes_go_both_ways(connect: Callable[[Talk], Callable[[], socket.socket]]) -> None:
    client = connect(echo)()
    for word in (b"one", b"two", bytes(100_000)):
        client.sendall(word)
        got = b""
        while len(got) < len(word):
            got += client.recv(65536)
        assert got == word


def test_an_answer_comes_after_the_question_was_closed(connect: Callable[[Talk], Callable[[], socket.socket]]) -> None:
    def answer(connection: socket.socket) -> None:
        question = read_all(connection)
        time.sleep(0.05)
        connection.sendall(question[::-1])

    client = connect(answer)()
    client.sendall(b"abc")
    client.shutdown(socket.SHUT_WR)
    assert read_all(client) == b"cba"


def test_a_server_that_ends_its_half_still_receives_from_the_client(
    connect: Callable[[Talk], Callable[[], socket.socket]],
) -> None:
    received: list[bytes] = []
    done = threading.Event()

    def greet(connection: socket.socket) -> None:
        connection.sendall(b"hello")
        connection.shutdown(socket.SHUT_WR)
        received.append(read_all(connection))
        done.set()

    client = connect(greet)()
    assert read_all(client) == b"hello"
    client.sendall(b"late")
    client.close()
    assert done.wait(30)
    assert received == [b"late"]


def test_a_slow_reader_slows_its_writer_and_loses_nothing(
    connect: Callable[[Talk], Callable[[], socket.socket]],
) -> None:
    sent = threading.Event()
    content = os.urandom(30_000_000)

    def pour(connection: socket.socket) -> None:
        connection.sendall(content)
        sent.set()

    client = connect(pour)()
    assert client.recv(1) == content[:1]
    assert not sent.wait(0.3), "everything was taken although the client does not read"
    assert read_all(client) == content[1:]
    assert sent.wait(30)


def test_one_slow_connection_does_not_hold_up_another(connect: Callable[[Talk], Callable[[], socket.socket]]) -> None:
    start = connect(lambda connection: connection.sendall(bytes(30_000_000)))
    slow = start()
    quick = connect(echo)()
    quick.sendall(b"quick")
    assert quick.recv(100) == b"quick"
    slow.close()


def test_a_client_that_breaks_off_frees_the_server(connect: Callable[[Talk], Callable[[], socket.socket]]) -> None:
    ended = threading.Event()

    def wait(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(b"x")
            connection.recv(10)
        ended.set()

    client = connect(wait)()
    client.recv(1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
    client.close()
    assert ended.wait(30)


def test_without_a_server_the_connection_ends(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    exposure = Relay().add(listener, tmp_path / "missing")
    with socket.create_connection(listener.getsockname(), 10) as client:
        with contextlib.suppress(ConnectionError):
            assert client.recv(10) == b""
    exposure.close()


def test_a_full_queue_of_the_server_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        listener = socket.create_server(("127.0.0.1", 0))
        exposure = Relay().add(listener, path)
        clients = [socket.create_connection(listener.getsockname(), 10) for _ in range(8)]
        time.sleep(0.1)
        threading.Thread(target=serve, args=(server, echo), daemon=True).start()
        for number, client in enumerate(clients):
            client.sendall(b"%d" % number)
            assert client.recv(10) == b"%d" % number
            client.close()
        exposure.close()
        server.shutdown(socket.SHUT_RDWR)


def test_closing_ends_connections_and_the_thread(tmp_path: Path) -> None:
    before = relay_threads()
    relay = Relay()
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(8)
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        exposure = relay.add(listener, path)
        (started,) = relay_threads() - before
        with socket.create_connection(address, 10) as client:
            accepted, _ = server.accept()
            exposure.close()
            exposure.close()
            with contextlib.suppress(ConnectionError):
                assert client.recv(10) == b""
            accepted.close()
        started.join(30)
        assert not started.is_alive(), "the thread did not end"
        with pytest.raises(OSError):
            socket.create_connection(address, 1)
        again = socket.create_server(("127.0.0.1", 0))
        relay.add(again, path).close()


def test_the_last_listener_can_be_closed_while_the_thread_is_awake(tmp_path: Path) -> None:
    """The thread must not carry out the order to stop, and close its sockets, before it has been woken for it."""
    before = relay_threads()
    relay = Relay()
    exposure = relay.add(socket.create_server(("127.0.0.1", 0)), tmp_path / "missing")
    (started,) = relay_threads() - before
    loop = relay._loop
    assert loop is not None
    wake = loop._csock  # type: ignore[attr-defined]

    class Late:
        """A socket that is slow to send: the thread may do meanwhile what it can."""

        close = wake.close

        def send(self, data: bytes) -> int:
            started.join(0.3)
            return wake.send(data)

    loop._csock = Late()  # type: ignore[attr-defined]
    exposure.close()
    started.join(30)
    assert not started.is_alive()
    relay.add(socket.create_server(("127.0.0.1", 0)), tmp_path / "missing").close()


def test_the_path_of_a_socket_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(folder, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        server.listen(4)
        threading.Thread(target=serve, args=(server, echo), daemon=True).start()
        listener = socket.create_server(("127.0.0.1", 0))
        exposure = Relay().add(listener, folder / "socket")
        with socket.create_connection(listener.getsockname(), 10) as client:
            client.sendall(b"far")
            assert client.recv(10) == b"far"
        exposure.close()
        server.shutdown(socket.SHUT_RDWR)
