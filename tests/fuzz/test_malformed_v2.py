"""Whatever comes in a frame of protocol v2, the server answers it with a code of the protocol and goes on.

Messages are like real ones with some fields exchanged for values of any kind, in both encodings, on a real server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import ClientConnection, connect

from environments import Add, Counter, Sum
from openenv.server.app import create_app
from servers import Serve

KNOWN = {
    "INVALID_JSON",
    "UNKNOWN_TYPE",
    "VALIDATION_ERROR",
    "SESSION_NOT_FOUND",
    "SESSION_LOST",
    "STALE_REQUEST",
    "CAPACITY_REACHED",
    "CANCELLED",
}
PING = 2**40

odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.just("x" * 3000)
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
SESSION = "SESSION"  # stands for the name of the open session
TOKEN = "TOKEN"
usual: dict[str, dict[str, Any]] = {
    "open": {"resume": TOKEN, "nonce": "n" * 20, "wait_s": 0.0, "compress": 10**6},
    "reset": {"session": SESSION, "data": {"seed": 1}, "timeout_s": 5.0, "traceparent": "00-a-b-01"},
    "step": {"session": SESSION, "data": {"amount": 1}, "kwargs": {}, "timeout_s": 5.0, "traceparent": "x"},
    "state": {"session": SESSION, "traceparent": "x"},
    "mcp": {"session": SESSION, "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}},
    "cancel": {"request": 1, "session": SESSION},
    "ping": {},
    "hello": {"limits": {}},
}


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a message: a usual one with some keys left out, some values exchanged, and perhaps a key too many."""
    kind = draw(st.sampled_from(sorted(usual)))
    message = {"type": kind, "id": draw(st.integers(1, 1000)), **usual[kind]}
    for key in draw(st.sets(st.sampled_from(sorted(message)), max_size=3)):
        if draw(st.booleans()):
            del message[key]
        else:
            message[key] = draw(odd)
    if draw(st.integers(0, 5)) == 0:
        message[draw(st.text(max_size=6))] = draw(odd)
    return message


batches = st.builds(
    lambda requests, each, more: {"type": "batch", "id": 5, "requests": requests, **each, **more},
    st.lists(messages() | odd, max_size=4) | odd,
    st.sampled_from([{}, {"each": False}]) | st.fixed_dictionaries({"each": odd}),
    st.just({}) | st.dictionaries(st.text(max_size=6), odd, max_size=1),
)


class Peer:
    """A client with one session, which answers for what comes back."""

    def __init__(self, port: int, subprotocol: Any) -> None:
        address = f"ws://127.0.0.1:{port}/ws"
        manager = connect(address, subprotocols=[subprotocol], proxy=None, max_size=None)
        self._connection: ClientConnection = manager.__enter__()
        self.is_packed = "msgpack" in subprotocol
        self._pings = PING
        self.open()

    def open(self) -> None:
        self._send({"type": "open", "id": 1_000_000})
        opened = self._take()
        assert opened["type"] == "opened", opened
        self._names = {SESSION: opened["session"], TOKEN: opened["token"]}

    def check(self, message: Any) -> None:
        """Send a message; everything until the answer to a ping behind it is an answer of the protocol."""
        self._send(self._filled(message))
        self._pings += 1
        self._send({"type": "ping", "id": self._pings})
        while (reply := self._take()) != {"type": "pong", "id": self._pings}:
            for one in reply["replies"] if reply["type"] == "batch" else [reply]:
                if one["type"] == "error":
                    assert one["data"]["code"] in KNOWN, one
                    assert len(json.dumps(one, default=str)) < 20_000

    def close(self) -> None:
        self._connection.close()

    def _filled(self, message: Any) -> Any:
        if isinstance(message, dict):
            return {key: self._filled(value) for key, value in message.items()}
        if isinstance(message, list):
            return [self._filled(value) for value in message]
        return self._names.get(message, message) if isinstance(message, str) else message

    def _send(self, message: Any) -> None:
        if self.is_packed:
            self._connection.send(msgpack.packb(message, default=str))
        else:
            self._connection.send(json.dumps(message))

    def _take(self) -> dict[str, Any]:
        raw = self._connection.recv(timeout=30)
        reply: dict[str, Any] = msgpack.unpackb(raw) if self.is_packed else json.loads(raw)
        return reply


@pytest.fixture(scope="module")
def port(serve_once: Serve) -> int:
    found: int = serve_once(create_app(Counter, Add, Sum, max_concurrent_envs=10_000)).port
    return found


@pytest.fixture(params=["openenv.v2.json", "openenv.v2.msgpack"])
def peer(request: pytest.FixtureRequest, port: int) -> Iterator[Peer]:
    peer = Peer(port, request.param)
    yield peer
    peer.close()


QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def finite(value: Any, is_packed: bool) -> Any:
    """Return a value that the encoding of the test can write: MessagePack has no integers over 64 bits."""
    if isinstance(value, dict):
        return {key: finite(item, is_packed) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item, is_packed) for item in value]
    if is_packed and isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    return value


@QUICK
@given(messages())
def test_a_message_with_odd_fields_is_answered_with_a_known_code(peer: Peer, message: dict[str, Any]) -> None:
    peer.check(finite(message, peer.is_packed))


@QUICK
@given(batches)
def test_a_batch_with_odd_parts_is_answered_with_known_codes(peer: Peer, message: dict[str, Any]) -> None:
    peer.check(finite(message, peer.is_packed))


@QUICK
@given(odd)
def test_what_is_no_message_at_all_is_answered_with_a_known_code(peer: Peer, message: Any) -> None:
    peer.check(finite(message, peer.is_packed))


@pytest.mark.parametrize("token", [None, 7, 1.5, True, ["a"], {"a": 1}, "x" * 100_000, "\x00", "a.b.c", ""], ids=str)
def test_a_resume_that_is_no_token_opens_no_other_session(port: int, token: Any) -> None:
    peer = Peer(port, "openenv.v2.json")
    peer._send({"type": "open", "id": 7, "resume": token})
    reply = peer._take()
    peer.close()
    assert (reply["type"], reply["id"]) == ("error", 7)
    assert reply["data"]["code"] == ("SESSION_LOST" if isinstance(token, str) else "VALIDATION_ERROR")
