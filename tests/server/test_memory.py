"""Soak: the memory of a server process stays flat while clients attack it, and the others are served.

Each attack runs against a server in a process of its own; its peak is read from /proc and compared with what the
attack may cost at most. Figures of a run: `pytest -s tests/server/test_memory.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from openenv.protocol.frames import masked_frame, masked_text_frame
from slow_steps import take
from waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc of Linux"),
]

MB = 1024 * 1024
KEY = bytes(4)
REPLY = 6 * MB
REQUEST = 15 * MB
SOURCE = Path(__file__).parents[2] / "src"
APPLICATION = """
from typing import Any

from openenv import Action, Environment, Observation, State
from openenv.server.app import create_app

class Ask(Action):
    size: int = 0
    text: Any = None

class Answer(Observation):
    text: str = ""

class Large(Environment[Ask, Answer, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, **kwargs: Any) -> Answer:
        return Answer()

    def step(self, action: Ask, **kwargs: Any) -> Answer:
        return Answer(text="x" * action.size)

    @property
    def state(self) -> State:
        return State(blob="y" * 8_000_000)

app = create_app(Large, Ask, Answer, max_concurrent_envs=300)
"""


class Server:
    """A server in a process of its own, and its memory."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.pid = process.pid
        self.port = port

    def memory(self, name: str = "VmRSS") -> int:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]

    def settle(self, steady_s: float = 1.0) -> None:
        """Wait until the peak of the memory has not grown for a while; it may not grow for ever."""
        peak, since = 0, time.monotonic()

        def is_steady() -> bool:
            nonlocal peak, since
            if (now := self.memory("VmHWM")) > peak:
                peak, since = now, time.monotonic()
            return time.monotonic() - since > steady_s

        wait_until(is_steady, 60, "the memory keeps growing", every_s=0.05)

    @contextlib.contextmanager
    def grows_by_at_most(self, limit: int, what: str) -> Iterator[None]:
        """Check the peak of the memory within the block, and that another client is served all the time."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
        before = self.memory()
        neighbour = Neighbour(self.port)
        began = time.monotonic()
        try:
            yield
        finally:
            longest = neighbour.stop()
        grown = self.memory("VmHWM") - before
        spent = time.monotonic() - began
        waits = f"longest wait of another client {longest:.2f} s"
        sys.stdout.write(f"\n{what}: {grown / MB:.0f} MB, {spent:.1f} s; {waits}")
        assert grown < limit, f"{what}: {grown / MB:.0f} MB"

    def connect(self) -> socket.socket:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        peer.settimeout(60)
        peer.connect(("127.0.0.1", self.port))
        return peer

    def websocket(self, protocol: str = "openenv.v2.json") -> socket.socket:
        peer = self.connect()
        offered = f"Sec-WebSocket-Protocol: {protocol}\r\n" if protocol else ""
        peer.sendall(
            "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            f"Sec-WebSocket-Version: 13\r\nAuthorization: Bearer trainer\r\n{offered}\r\n".encode()
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += peer.recv(1)
        assert b" 101 " in head
        return peer


NEIGHBOUR = """
import json, sys, time
from websockets.sync.client import connect

address, token = sys.argv[1:]
headers = {"Authorization": f"Bearer {token}"}
with connect(address, subprotocols=["openenv.v2.json"], additional_headers=headers, proxy=None) as peer:
    def ask(message):
        peer.send(json.dumps(message))
        return json.loads(peer.recv(timeout=120))
    ask({"type": "open", "id": 1})
    print("ready", flush=True)
    steps, longest, end = 0, 0.0, time.monotonic() + 600
    while time.monotonic() < end:
        steps += 1
        began = time.monotonic()
        assert ask({"type": "step", "id": steps, "data": {}})["type"] == "observation"
        longest = max(longest, time.monotonic() - began)
        print(longest, flush=True)
        time.sleep(0.01)
"""


class Neighbour:
    """A client in a process of its own that steps all the time, and says how long its longest step has taken."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-c", NEIGHBOUR, f"ws://127.0.0.1:{port}/ws", "trainer"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self._lines: list[str] = []
        self._thread = threading.Thread(target=lambda: self._lines.extend(self._process.stdout or ()))
        self._thread.start()

    def stop(self) -> float:
        count = len(self._lines)
        wait_until(lambda: len(self._lines) > count or self._process.poll() is not None, 60)
        failed = self._process.poll() is not None
        self._process.kill()
        self._process.wait()
        self._thread.join()
        assert not failed, "another client was disconnected"
        assert len(self._lines) > count, "another client gets no replies any more"
        return float(self._lines[-1])


def dial(port: int, token: str, protocol: Any = "openenv.v2.json") -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    address = f"ws://127.0.0.1:{port}/ws"
    return connect(
        address, subprotocols=[protocol], additional_headers=headers, proxy=None, max_size=None, ping_interval=None
    )


def ask(peer: Any, message: dict[str, Any]) -> dict[str, Any]:
    peer.send(json.dumps(message))
    reply: dict[str, Any] = json.loads(peer.recv(timeout=120))
    return reply


def frame(message: dict[str, Any]) -> bytes:
    return masked_text_frame(json.dumps(message).encode(), KEY)


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(*options: str, fast: bool = True) -> Server:
            (tmp_path / "large_app.py").write_text(APPLICATION, encoding="utf-8")
            command = [sys.executable, "-m", "openenv", "serve", "large_app:app", "--port", "0", "--no-web"]
            command += ["--log-level", "error", "--token", "trainer", "--agent-token", "agent", *options]
            environ = {**os.environ, "PYTHONPATH": f"{SOURCE}:{tmp_path}", "OPENENV_FAST": "1" if fast else "0"}
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=pipe, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stderr is not None
            port = int(re.search(r":(\d+)", process.stderr.readline())[1])  # type: ignore[index]
            threading.Thread(target=process.stderr.read, daemon=True).start()
            with dial(port, "trainer") as peer:  # everything is loaded
                ask(peer, {"type": "open", "id": 1})
                ask(peer, {"type": "step", "id": 1, "data": {"size": 1000}})
                ask(peer, {"type": "close", "id": 2})
            return Server(process, port)

        yield start


# -- messages that would grow ---------------------------------------------------------------------------------------

MANY = 5_000_000
MESSAGES: dict[str, tuple[str, bytes]] = {
    "a batch of empty requests": ("json", b'{"type":"batch","id":1,"requests":[' + b"{}," * MANY + b"{}]}"),
    "the same with its type at the end": ("json", b'{"requests":[' + b"{}," * MANY + b'{}],"id":1,"type":"batch"}'),
    "a batch of numbers": ("json", b'{"type":"batch","id":1,"requests":[' + b"1," * MANY + b"1]}"),
    "a step of lists": ("json", b'{"type":"step","id":1,"data":{"text":[' + b"[1]," * MANY + b"[]]}}"),
    "a packed batch": (
        "msgpack",
        b"\x83\xa4type\xa5batch\xa2id\x01\xa8requests\xdd" + MANY.to_bytes(4, "big") + b"\x80" * MANY,
    ),
    "packed lists in lists": (
        "msgpack",
        b"\x83\xa4type\xa5batch\xa2id\x01\xa8requests" + (b"\xdd" + MANY.to_bytes(4, "big")) * 900 + b"\x90" * MANY,
    ),
}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
def test_messages_of_very_many_values_cost_little_and_stop_no_other_client(start: Start, fast: bool) -> None:
    server = start(fast=fast)
    for name, (codec, payload) in MESSAGES.items():
        mark = b"\xc1" if codec == "msgpack" else b""
        for title, sent in ((name, payload), (f"{name}, compressed", mark + zlib.compress(payload, 1))):
            is_text = codec == "json" and sent is payload
            with (
                dial(server.port, "agent", f"openenv.v2.{codec}") as peer,
                server.grows_by_at_most(12 * len(payload) + 64 * MB, f"{title}, {len(sent) / MB:.2f} MB"),
            ):
                peer.send(sent.decode() if is_text else sent)
                reply = peer.recv(timeout=120)
                assert "INVALID_JSON" in reply if isinstance(reply, str) else b"INVALID_JSON" in reply


def test_the_largest_messages_cost_a_few_times_their_size(start: Start) -> None:
    server = start()
    largest = 100 * MB - 1000
    for title, item in {"lists": b"[],", "objects": b'{"a":1},', "commas": b'",",', "quotes": b'"\\"",'}.items():
        payload = b'{"type":"step","id":1,"data":{"text":[' + item * (largest // len(item)) + b"0]}}"
        with (
            dial(server.port, "trainer") as peer,
            server.grows_by_at_most(8 * len(payload), f"{len(payload) / MB:.0f} MB of {title}"),
        ):
            peer.send(payload.decode())
            assert "INVALID_JSON" in peer.recv(timeout=120)


# -- clients that do not read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
def test_clients_that_do_not_read_cost_no_more_than_the_limit(start: Start, fast: bool) -> None:
    limit, clients = 128 * MB, 6
    server = start("--max-unread-mb", str(limit // MB), fast=fast)
    for title, attack in ATTACKS.items():
        # What is unread; for each session a few replies (kept, made, written), what its thread's allocator keeps, and
        # its requests, of which plain ASGI has more copies.
        most = limit + clients * (4 * REPLY + 64 * MB + (2 if fast else 8) * REQUEST)
        with contextlib.ExitStack() as stack, server.grows_by_at_most(most, title):
            for _ in range(clients):
                stack.enter_context(contextlib.closing(attack(server)))
            server.settle()
        server.settle()


def pipelined_steps(server: Server) -> socket.socket:
    peer = server.websocket()
    peer.sendall(frame({"type": "open", "id": 1}))
    peer.sendall(b"".join(frame({"type": "step", "id": n, "data": {"size": REPLY}}) for n in range(1, 120)))
    return peer


def large_requests(server: Server) -> socket.socket:
    return sending(server, (masked_text_frame(large_step(number), KEY) for number in range(1, 5)))


def packed_requests(server: Server) -> socket.socket:
    return sending(server, packed_steps())


@functools.cache
def packed_steps() -> list[bytes]:
    return [masked_frame(0x82, zlib.compress(large_step(number), 1), KEY) for number in range(1, 20)]


def large_step(number: int) -> bytes:
    return b'{"type":"step","id":%d,"data":{"size":%d,"text":"%b"}}' % (number, REPLY, b"x" * REQUEST)


def sending(server: Server, frames: Iterable[bytes]) -> socket.socket:
    """Open a session and send frames until the server reads no more."""
    peer = server.websocket()
    peer.sendall(frame({"type": "open", "id": 1}))
    peer.settimeout(2)
    with contextlib.suppress(TimeoutError, ConnectionError):
        for one in frames:
            peer.sendall(one)
    return peer


def repeated_batch(server: Server) -> socket.socket:
    peer = server.websocket()
    peer.sendall(frame({"type": "open", "id": 1}))
    step = {"type": "step", "id": 1, "data": {"size": REPLY}}
    peer.sendall(frame(step))
    with contextlib.suppress(ConnectionError):
        for number in range(2, 6):
            peer.sendall(frame({"type": "batch", "id": number, "requests": [step] * 10_000, "each": number % 2 == 0}))
    return peer


def v1_states(server: Server) -> socket.socket:
    peer = server.websocket("")
    peer.sendall(frame({"type": "state"}) * 1000)
    return peer


def http_states(server: Server) -> socket.socket:
    peer = server.connect()
    head = b"GET /state HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer trainer\r\n\r\n"
    peer.sendall(head * 200)
    return peer


ATTACKS: dict[str, Callable[[Server], socket.socket]] = {
    "120 steps ahead, 6 MB each": pipelined_steps,
    "requests of 15 MB": large_requests,
    "requests of 15 MB, compressed": packed_requests,
    "batches of 10,000 repeated requests": repeated_batch,
    "1000 states of protocol v1, 8 MB each": v1_states,
    "200 states over HTTP, 8 MB each": http_states,
}


@pytest.mark.parametrize("piece", [MB, 1400], ids=["in large pieces", "in small pieces"])
def test_messages_that_do_not_end_cost_no_more_than_the_limit(start: Start, piece: int) -> None:
    server = start("--max-unread-mb", "128")
    begin = masked_frame(0x01, b" " * (60 * MB), KEY)
    most = 200 * MB + 4 * len(begin)  # two of the largest size, and the copies of one that is being read
    with contextlib.ExitStack() as stack, server.grows_by_at_most(most, f"messages that do not end, {piece}"):
        for _ in range(16):
            peer = stack.enter_context(contextlib.closing(server.websocket()))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError):
                for start_at in range(0, len(begin), piece):
                    peer.sendall(begin[start_at : start_at + piece])


def test_a_thousand_messages_after_another_leave_nothing_behind(start: Start) -> None:
    server = start("--grace", "0")  # or each client that left has a session, with its last replies, for a minute
    payload = MESSAGES["a batch of empty requests"][1][: 3 * 200_000].rstrip(b",") + b"]}"

    def round_of_attacks() -> None:
        with dial(server.port, "agent") as peer:
            for _ in range(20):
                peer.send(payload.decode())
                peer.recv(timeout=120)
        with contextlib.suppress(ConnectionClosed), contextlib.closing(pipelined_steps(server)):
            take(0.2)  # of replies that nobody reads

    for _ in range(5):
        round_of_attacks()
    warm = server.memory()
    for _ in range(20):
        round_of_attacks()
    wait_until(lambda: server.memory() < warm + 64 * MB, message=lambda: f"{(server.memory() - warm) / MB:.0f} MB more")
