"""Connections to the proxy: no agent keeps another one out, however many it opens and holds."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import SandboxUnavailable
from openenv.rollout import CaptureServer, Model
from openenv.sandboxes import LocalSandboxes, Sandboxes
from openenv.sandboxes import exposed_ports as relay_module
from openenv.sandboxes.host import ConnectionQuota

QUESTION = b'{"model": "any", "messages": [{"role": "user", "content": "hi"}]}'


def ask(connection: socket.socket, key: str) -> None:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(QUESTION)}\r\n\r\n"
    )
    connection.sendall(head.encode() + QUESTION)


def status(connection: socket.socket) -> bytes:
    """The status of the next answer; nothing if the connection was closed."""
    answer = http.client.HTTPResponse(connection)
    try:
        answer.begin()
        answer.read()  # it may come in pieces
    except ConnectionError:
        return b""
    return str(answer.status).encode()


@pytest.fixture
def dial(server: CaptureServer) -> Iterator[Callable[[], socket.socket]]:
    """Connect to the proxy's socket, as a relay does."""
    with contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(20)
            connection.connect(str(server.socket))
            return connection

        yield connect


def test_connections_without_a_key_give_way_to_new_ones(server: CaptureServer, agent: Any, dial: Any) -> None:
    server._agents.quota = ConnectionQuota(own=2, shared=16)
    mine = dial()
    ask(mine, agent.capture.key)
    assert status(mine) == b"200"
    idle = [dial() for _ in range(60)]
    for _ in range(3):
        assert agent.chat().status_code == 200
    assert sum(status(one) == b"" for one in idle[:40]) == 40
    ask(mine, agent.capture.key)
    assert status(mine) == b"200", "a connection with a key had to make room"


def test_connections_of_a_sandbox_that_has_many_make_room_first(server: CaptureServer, agent: Any) -> None:
    server._agents.quota = ConnectionQuota(own=2, shared=16)
    with contextlib.ExitStack() as stack:

        def named(name: str) -> socket.socket:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(20)
            connection.bind(f"\0openenv-relay/test/{name}")
            connection.connect(str(server.socket))
            return connection

        before = [named(f"one/{number}") for number in range(2)]
        flood = [named(f"greedy/{number}") for number in range(100)]
        after = [named(f"two/{number}") for number in range(2)]
        for connection in (*before, *after):
            ask(connection, agent.capture.key)
            assert status(connection) == b"200"
        assert sum(status(one) == b"" for one in flood[:80]) == 80


def test_a_key_with_many_calls_under_way_is_refused_more_and_no_other_key(
    server: CaptureServer, engine: Any, fake: Any, open_agent: Callable[..., Any], dial: Any, wait_for: Any
) -> None:
    server._agents.quota = ConnectionQuota(own=2, shared=4)
    greedy, neighbour = open_agent("greedy"), open_agent("neighbour")
    engine.respond = lambda request: fake.Answer.events(60.0, fake.DONE)  # no answer for a minute
    busy = [dial() for _ in range(4)]
    for one in busy:
        ask(one, greedy.capture.key)
    wait_for(lambda: greedy.capture.stats().active == 4)
    more = [dial() for _ in range(3)]
    for one in more:
        ask(one, greedy.capture.key)
    assert [status(one) for one in more] == [b"429"] * 3
    engine.respond = fake.vllm([1, 2])
    for _ in range(2):
        one = dial()
        ask(one, neighbour.capture.key)
        assert status(one) == b"200"
    for one in busy:
        one.close()
    wait_for(lambda: server._agents.quota.held(greedy.capture.key) == 0)


def test_a_keys_idle_connections_give_way_to_its_next_call(
    server: CaptureServer, open_agent: Callable[..., Any], dial: Any
) -> None:
    server._agents.quota = ConnectionQuota(own=2, shared=0)
    one, other = open_agent("one"), open_agent("other")
    kept = []
    for _ in range(10):
        for agent in (one, other):
            connection = dial()
            ask(connection, agent.capture.key)
            assert status(connection) == b"200"
            kept.append(connection)
    assert sum(status(connection) == b"" for connection in kept[:16]) == 16


def test_a_body_of_many_values_is_refused_before_it_is_parsed(server: CaptureServer, agent: Any, engine: Any) -> None:
    """60 MB of small objects take the proxy seconds to parse, in which no other agent is answered, and gigabytes."""
    objects = b'{"model": "any", "messages": [' + b'{"a":1},' * 1_000_000 + b"{}]}"
    assert agent.post("/chat/completions", "ok").status_code == 400
    refused = agent.client.post("/chat/completions", content=objects, headers=agent.headers)
    assert (refused.status_code, "JSON values" in refused.text) == (413, True)
    assert agent.chat("a text, with commas, " * 50_000).status_code == 200
    numbers = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "ids": list(range(100_000))}
    assert agent.post("/chat/completions", numbers).status_code == 200
    assert server._agents._held == {}


def test_many_large_requests_of_one_key_leave_time_for_the_requests_of_others(
    server: CaptureServer, engine: Any, open_agent: Callable[..., Any], dial: Any
) -> None:
    greedy, neighbour = open_agent("greedy"), open_agent("neighbour")
    body = b'{"model": "any", "messages": [' + b'{"role":"user","content":"x"},' * 8000 + b"{}]}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {greedy.capture.key}\r\n"
    large = [dial() for _ in range(10)]
    for one in large:
        one.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-1])
    quick = dial()
    ask(quick, neighbour.capture.key)  # so that only what comes next is counted
    assert status(quick) == b"200"
    for one in large:
        one.sendall(body[-1:])
    ask(quick, neighbour.capture.key)
    assert status(quick) == b"200"
    assert greedy.capture.stats().calls <= 5, "a neighbour waited for most of the large requests"
    assert [status(one) for one in large] == [b"200"] * 10


# The same from inside of sandboxes, in a process with few descriptors

FLOOD = """
import select, socket, sys, time
held = []
poll = select.poll()
for _ in range(700):
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex(("127.0.0.1", 7000))
    held.append(s)
    poll.register(s, select.POLLIN)
print("flooding", flush=True)
closed = set()
while True:
    for fd, _ in poll.poll():
        poll.unregister(fd)
        closed.add(fd)
        print("closed", len(closed), flush=True)
"""
CALL = """
import json, sys, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}]}).encode()
request = urllib.request.Request("http://127.0.0.1:7000/v1/chat/completions", body, {"x-api-key": sys.argv[1]})
print(urllib.request.urlopen(request, timeout=20).status)
"""


@pytest.fixture
def low_limit() -> Iterator[None]:
    """Lower this process's limit of descriptors to the usual one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def sandboxes(low_limit: None) -> Sandboxes:
    backend = LocalSandboxes()
    try:
        backend.check()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return backend


@pytest.mark.slow
def test_seven_hundred_connections_of_one_agent_harm_no_other(
    sandboxes: Sandboxes, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_for: Any
) -> None:
    monkeypatch.setattr(relay_module, "_PLACE_S", 0.2)
    monkeypatch.setattr(relay_module, "_RATE", 2000.0)
    model = Model(base_url=engine.url, name="m")
    with CaptureServer(tmp_path / "records") as server:
        sandboxes.check()
        before = len(os.listdir("/proc/self/fd"))
        with contextlib.ExitStack() as stack:
            boxes = [stack.enter_context(sandboxes.open()) for _ in range(4)]
            for box in boxes:
                box.expose(server.socket, port=7000)
            output: list[bytes] = []
            job = boxes[0].start_bg(["python3", "-c", FLOOD], on_output=lambda _, data: output.append(data))
            wait_for(lambda: b"flooding" in b"".join(output))
            wait_for(lambda: b"closed" in b"".join(output), 30)  # the agent sees that it has too many
            keys = [server.open(None, model).key for _ in boxes]
            for box, key in list(zip(boxes, keys, strict=True))[1:]:
                for _ in range(2):
                    done = box.exec(["python3", "-c", CALL, key])
                    assert done.stdout == "200\n", done.stderr
            assert len(os.listdir("/proc/self/fd")) < 500
            stack.enter_context(sandboxes.open())  # there are descriptors for more sandboxes, too
            job.kill()
            call = boxes[0].exec(["python3", "-c", CALL, keys[0]])
            assert call.stdout == "200\n", call.stderr
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before + 8)  # connections to the endpoint are kept
