"""Checks: sockets of the host that a sandbox may reach."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from openenv.errors import SandboxError
from openenv.sandboxes.base import Sandbox
from openenv.sandboxes.checks.bench import Bench, Check, holds, raises, same

_ASK = """
import socket
s = socket.create_connection(("127.0.0.1", {port}), 10)
s.sendall(b"question")
s.shutdown(socket.SHUT_WR)
got = b""
while True:
    data = s.recv(65536)
    if not data: break
    got += data
print(got.decode())
"""
_MANY = """
import socket, threading
wrong = []
def ask(number):
    word = b"w%d" % number
    s = socket.create_connection(("127.0.0.1", {port}), 30)
    s.sendall(word)
    s.shutdown(socket.SHUT_WR)
    got = b""
    while True:
        data = s.recv(4096)
        if not data: break
        got += data
    if got != b"<" + word + b">": wrong.append(got)
threads = [threading.Thread(target=ask, args=(n,)) for n in range(100)]
for t in threads: t.start()
for t in threads: t.join()
print(len(wrong))
"""
_STREAM = """
import socket, time
s = socket.create_connection(("127.0.0.1", {port}), 10)
s.sendall(b"go")
times = []
while True:
    data = s.recv(4096)
    if not data: break
    times.append(time.monotonic())
print(len(times), times[-1] - times[0])
"""
_LARGE = """
import hashlib, socket, threading
s = socket.create_connection(("127.0.0.1", {port}), 30)
sent = bytes(range(256)) * 80_000
def send():
    s.sendall(sent)
    s.shutdown(socket.SHUT_WR)
t = threading.Thread(target=send)
t.start()
got = hashlib.sha256()
size = 0
while True:
    data = s.recv(1 << 20)
    if not data: break
    got.update(data)
    size += len(data)
t.join()
print(size, got.hexdigest() == hashlib.sha256(sent).hexdigest())
"""


def ask(bench: Bench) -> None:
    """Ask a server of the host something, by a connection closed on one side."""
    with _served(bench, _answer) as (box, port):
        same(bench.python(box, _ASK.format(port=port)).stdout, "<question>\n", "the answer")


def url(bench: Bench) -> None:
    """Get the address of a port."""
    with _serving(bench.folder() / "s", _answer) as path:
        port = _free_port()
        same(bench.open().expose(path, port=port), f"http://127.0.0.1:{port}", "the URL")


def streaming(bench: Bench) -> None:
    """Receive parts as they are sent."""
    with _served(bench, _drip) as (box, port):
        count, seconds = bench.python(box, _STREAM.format(port=port)).stdout.split()
        holds(int(count) >= 5 and float(seconds) > 0.3, f"{count} parts within {seconds} s: they were held back")


def many(bench: Bench) -> None:
    """Make 100 connections at once."""
    with _served(bench, _answer) as (box, port):
        same(bench.python(box, _MANY.format(port=port), timeout=60).stdout, "0\n", "the number of wrong answers")


def large(bench: Bench) -> None:
    """Send and receive 20 MB at once."""
    with _served(bench, _echo) as (box, port):
        same(bench.python(box, _LARGE.format(port=port), timeout=60).stdout, "20480000 True\n", "size and hash")


def nothing_else(bench: Bench) -> None:
    """Try other ports, and have no server behind the port."""
    with _served(bench, _answer) as (box, _):
        holds(bench.python(box, _ASK.format(port=1)).exit_code != 0, "another port was open")
        silent = _free_port()
        box.expose(bench.folder() / "nobody", port=silent)
        result = bench.python(box, _ASK.format(port=silent), timeout=20)
        holds("<" not in result.stdout and not result.timed_out, "a port without a server answered or hung")


def stays(bench: Bench) -> None:
    """Kill all processes inside, and ask again."""
    with _served(bench, _answer) as (box, port):
        box.stop_processes()
        same(bench.python(box, _ASK.format(port=port)).stdout, "<question>\n", "the answer")


def two_ports(bench: Bench) -> None:
    """Expose two sockets, and one port twice."""
    with _serving(bench.folder() / "a", _answer) as one, _serving(bench.folder() / "b", _echo) as two:
        box = bench.open()
        first, second = _free_port(), _free_port()
        box.expose(one, port=first)
        box.expose(two, port=second)
        same(bench.python(box, _ASK.format(port=first)).stdout, "<question>\n", "the first answer")
        same(bench.python(box, _ASK.format(port=second)).stdout, "question\n", "the second answer")
        with raises(SandboxError):
            box.expose(one, port=first)


def not_outside(bench: Bench) -> None:
    """Connect to the port from the host."""
    with _served(bench, _answer) as (_, port), raises(OSError):
        socket.create_connection(("127.0.0.1", port), 2).close()


def _free_port() -> int:
    """Return a port that is free on the host, for backends that share the host's network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _served(bench: Bench, answer: Callable[[socket.socket], None]) -> Iterator[tuple[Sandbox, int]]:
    with _serving(bench.folder() / "s", answer) as path:
        box, port = bench.open(), _free_port()
        box.expose(path, port=port)
        yield box, port


@contextlib.contextmanager
def _serving(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[Path]:
    """Serve a unix socket of the host, a thread for each connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    thread = threading.Thread(target=_accept, args=(listener, answer), daemon=True)
    thread.start()
    try:
        yield path
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def _accept(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_talk, args=(accepted, answer), daemon=True).start()


def _talk(connection: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    with connection, contextlib.suppress(OSError):
        answer(connection)


def _answer(connection: socket.socket) -> None:
    asked = b""
    while data := connection.recv(65536):
        asked += data
    connection.sendall(b"<" + asked + b">")


def _drip(connection: socket.socket) -> None:
    connection.recv(100)
    for _ in range(6):
        connection.sendall(b"drop")
        time.sleep(0.1)


def _echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


_FEATURE = "ports"
CHECKS = (
    Check("port.ask", "A port inside reaches a socket of the host; a half-closed connection still answers.", ask),
    Check("port.url", "The URL of a port is on the loopback address.", url),
    Check("port.stream", "Bytes are passed on as they come.", streaming),
    Check("port.many", "100 connections at once get their own answers.", many),
    Check("port.large", "20 MB go both ways at once.", large),
    Check("port.nothing-else", "Other ports are closed, and one without a server ends the connection.", nothing_else),
    Check("port.stays", "A port outlives the processes inside.", stays),
    Check("port.two", "There can be several ports, each once.", two_ports),
    Check("port.not-outside", "The port is not open on the host.", not_outside, _FEATURE),
)
