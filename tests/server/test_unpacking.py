"""Compressed messages: large ones are unpacked in a thread, one at a time, and keep their order."""

from __future__ import annotations

import gc
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from environments import Add, Counter, Sum
from openenv.protocol import codec
from openenv.server.app import create_fastapi_app
from waiting import wait_until

MB = 1024 * 1024


@pytest.fixture
def server(serve: Any) -> Any:
    """A server of counters, which takes messages of 8 MB."""
    return serve(create_fastapi_app(Counter, Add, Sum, max_concurrent_envs=16, max_message_bytes=8 * MB))


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The thread and the largest size of each message that is unpacked, in their order."""
    calls: list[tuple[str, int]] = []
    decompressed = codec._decompressed

    def noted(data: Any, max_bytes: int) -> bytes:
        calls.append((threading.current_thread().name, max_bytes))
        return decompressed(data, max_bytes)

    monkeypatch.setattr(codec, "_decompressed", noted)
    return calls


def dial(server: Any) -> ClientConnection:
    return connect(
        f"ws://127.0.0.1:{server.port}/ws",
        subprotocols=["openenv.v2.json"],  # type: ignore[list-item]
        proxy=None,
        compression=None,
        max_size=None,
    )


@pytest.fixture
def peer(server: Any) -> Iterator[ClientConnection]:
    """A client with one session."""
    with dial(server) as connection:
        connection.send('{"type": "open", "id": 1}')
        assert json.loads(connection.recv(timeout=60))["type"] == "opened"
        yield connection


def step(number: int, size: int = 0) -> bytes:
    """Return a step that adds 1, and has that much text."""
    text = "".join(f"{n:x}-" for n in range(size // 7))
    return json.dumps({"type": "step", "id": number, "data": {"amount": 1}, "kwargs": {"text": text}}).encode()


def total(message: Any) -> int:
    reply = json.loads(message)
    assert reply["type"] == "observation", reply
    found: int = reply["data"]["observation"]["total"]
    return found


def test_messages_behind_a_large_one_wait_for_it(
    server: Any, peer: ClientConnection, unpacked: list[tuple[str, int]]
) -> None:
    for number in range(1, 13):
        large = number % 3 == 0
        content = step(number, 4 * MB if large else 100)
        peer.send(zlib.compress(content, 1) if number % 2 or large else content.decode())
    assert [total(peer.recv(timeout=60)) for _ in range(12)] == list(range(1, 13))
    loop_threads = {name for name, most in unpacked if most <= codec.QUICK_CONTENT}
    others = [name for name, most in unpacked if most > codec.QUICK_CONTENT]
    assert len(others) == 4
    assert len(loop_threads) == 1
    assert loop_threads.isdisjoint(others)


@pytest.mark.parametrize("damage", ["cut", "bomb", "values", "limit"])
def test_a_large_message_that_is_refused_ends_nothing(peer: ClientConnection, damage: str) -> None:
    packed = {
        "cut": zlib.compress(step(1, 4 * MB))[:-20],
        "bomb": zlib.compress(b"0" * 7 * MB),
        "values": zlib.compress(b'{"type":"step","id":1,"data":[' + b"[]," * 2 * MB + b"[]]}", 1),
        "limit": zlib.compress(step(1, 13 * MB), 1),
    }[damage]
    peer.send(packed)
    peer.send(step(1).decode())
    refused = json.loads(peer.recv(timeout=60))
    assert (refused["type"], refused["data"]["code"]) == ("error", "INVALID_JSON")
    assert total(peer.recv(timeout=60)) == 1


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("damage", ["cut", "bomb"])
def test_what_is_unpacked_of_a_refused_message_does_not_wait_for_the_collector(
    peer: ClientConnection, damage: str
) -> None:
    peer.send(zlib.compress(step(1, 4 * MB))[:-20] if damage == "cut" else zlib.compress(b"0" * 7 * MB))
    assert json.loads(peer.recv(timeout=60))["type"] == "error"
    peer.send(step(1).decode())
    assert total(peer.recv(timeout=60)) == 1

    def kept() -> list[BaseException]:
        return [one for one in gc.get_objects() if isinstance(one, ValueError) and "compressed" in str(one)]

    wait_until(lambda: not kept(), 10)


def test_clients_that_leave_while_their_messages_are_unpacked_cost_nothing(server: Any, peer: ClientConnection) -> None:
    packed = zlib.compress(step(1, 7 * MB), 1)
    for _ in range(12):
        with dial(server) as gone:
            gone.send('{"type": "open", "id": 1}')
            gone.recv(timeout=60)
            gone.send(packed)
            gone.socket.close()
    peer.send(packed)
    assert total(peer.recv(timeout=60)) == 1
