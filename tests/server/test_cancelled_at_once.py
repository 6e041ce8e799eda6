"""A request that is cancelled in the moment it comes is answered like any other: once."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from environments import Greeter
from openenv.protocol.frames import FrameReader, Opcode, masked_text_frame
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.app import create_app
from servers import RunningServer, Serve

KEY = bytes(4)


class Raw:
    """A client whose messages all go out at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader(1 << 24, masked=False)
        self._messages: list[dict[str, Any]] = []
        connection.sendall(
            b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: openenv.v2.json\r\n\r\n"
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)

    def send(self, *messages: dict[str, Any]) -> None:
        self._connection.sendall(b"".join(masked_text_frame(json.dumps(one).encode(), KEY) for one in messages))

    def take(self) -> dict[str, Any]:
        while not self._messages:
            data = self._connection.recv(65_536)
            assert data, "the server has hung up"
            self._messages += [json.loads(m.payload) for m in self._reader.feed(data) if m.opcode == Opcode.TEXT]
        return self._messages.pop(0)

    def take_by_id(self, *ids: int) -> dict[int, dict[str, Any]]:
        """Take one answer for each id, in any order."""
        found = {message["id"]: message for message in (self.take() for _ in ids)}
        assert set(found) == set(ids)
        return found


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    return serve(create_app(Greeter, CallToolAction, CallToolObservation, max_concurrent_envs=2))


@pytest.fixture
def peer(server: RunningServer) -> Iterator[Raw]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        yield Raw(connection)


def code(message: dict[str, Any]) -> str:
    assert message["type"] == "error", message
    found: str = message["data"]["code"]
    return found


@pytest.mark.parametrize("more", [{}, {"nonce": "a-nonce-that-nobody-guesses"}, {"wait_s": 5}], ids=str)
def test_an_open_that_is_cancelled_at_once_is_answered_and_leaves_nothing(
    server: RunningServer, peer: Raw, more: dict[str, Any]
) -> None:
    peer.send({"type": "open", "id": 1, **more}, {"type": "cancel", "id": 2, "request": 1})
    found = peer.take_by_id(1, 2)
    assert code(found[1]) == "CANCELLED"
    assert found[2] == {"type": "cancelled", "id": 2, "found": True}
    server.wait_for(lambda: server.manager.active == 0)
    peer.send({"type": "open", "id": 3, **more})
    assert peer.take()["type"] == "opened"


def test_a_tool_call_that_is_cancelled_at_once_is_answered_and_so_is_its_repetition(peer: Raw) -> None:
    peer.send({"type": "open", "id": 1})
    name = peer.take()["session"]
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    request = {"type": "mcp", "id": 1, "session": name, "data": rpc}
    peer.send(request, {"type": "cancel", "id": 2, "session": name, "request": 1})
    found = [peer.take(), peer.take()]
    assert {message["type"] for message in found} == {"error", "cancelled"}
    assert {code(message) for message in found if message["type"] == "error"} == {"CANCELLED"}
    peer.send(request)
    assert code(peer.take()) == "CANCELLED"
    peer.send({**request, "id": 2})
    assert [tool["name"] for tool in peer.take()["data"]["result"]["tools"]] == ["greet"]
