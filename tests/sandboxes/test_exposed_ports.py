"""The relay between listening sockets and unix sockets: half-closed, slow, broken and many connections."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openenv.sandboxes import exposed_ports as relay_module
from openenv.sandboxes.exposed_ports import Relay
from openenv.sandboxes.host import ConnectionQuota
from slow_steps import take
from waiting import holds_for, wait_until

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
        take(0.05)
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
        holds_for(0.1, lambda: not select.select(clients, [], [], 0)[0], "a connection was closed")
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


# Fairness between the sandboxes of a relay


class Served:
    """A unix socket that echoes, behind any number of listeners of one relay."""

    def __init__(self, path: Path, quota: ConnectionQuota) -> None:
        self._stack = contextlib.ExitStack()
        self._server = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._server.bind(str(path))
        self._server.listen(512)
        self._relay = Relay(quota)
        self._path = path
        self.accepted = 0
        threading.Thread(target=serve, args=(self._server, self._echo), daemon=True).start()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.callback(self._server.shutdown, socket.SHUT_RDWR)
        self._stack.close()

    def _echo(self, connection: socket.socket) -> None:
        self.accepted += 1
        echo(connection)

    def listener(self) -> Callable[[], socket.socket]:
        """Add a listener; return a function that connects to it."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        address = listener.getsockname()
        self._stack.callback(self._relay.add(listener, self._path).close)
        return lambda: self._stack.enter_context(socket.create_connection(address, 10))


def is_answered(client: socket.socket) -> bool:
    """Whether the far end answers; False if the connection was closed."""
    try:
        client.sendall(b"x")
        return client.recv(1) == b"x"
    except ConnectionError:
        return False


def test_one_sandbox_with_many_connections_keeps_no_other_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_PLACE_S", 0.1)
    with Served(tmp_path / "s", ConnectionQuota(own=2, shared=8)) as served:
        greedy = served.listener()
        held = [greedy() for _ in range(40)]
        assert sum(map(is_answered, held)) == 6  # the others were closed
        for neighbour in [served.listener() for _ in range(3)]:
            assert all(is_answered(neighbour()) for _ in range(2))
        for client in held:
            client.close()
        wait_until(lambda: is_answered(greedy()))


def test_a_burst_beyond_the_limit_waits_for_its_turn(tmp_path: Path) -> None:
    with Served(tmp_path / "s", ConnectionQuota(own=2, shared=0)) as served:
        connect = served.listener()
        waiting = [connect() for _ in range(20)]
        for client in waiting:
            assert is_answered(client)
            client.close()


def test_connections_are_accepted_no_faster_than_a_host_can_bear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_BURST", 10.0)
    monkeypatch.setattr(relay_module, "_RATE", 0.001)
    with Served(tmp_path / "s", ConnectionQuota()) as served:
        connect = served.listener()
        for _ in range(40):
            connect().close()
        wait_until(lambda: served.accepted == 10)
        holds_for(0.2, lambda: served.accepted == 10)
        assert is_answered(served.listener()())


def test_refused_connections_leave_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_PLACE_S", 0.0)
    before = len(os.listdir("/proc/self/fd"))
    with Served(tmp_path / "s", ConnectionQuota(own=1, shared=0)) as served:
        greedy = served.listener()
        held = [greedy() for _ in range(100)]
        assert sum(map(is_answered, held)) == 1
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
