"""The opening handshake: what is asked, and every answer that is not the right one."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from openenv.client.network import Address
from openenv.client.websocket import Handshake
from openenv.errors import ConnectFailed

ADDRESS = Address("host", 8000, "/ws?x=1", False)


def accept(handshake: Handshake) -> bytes:
    key = re.search(rb"Sec-WebSocket-Key: (\S+)", handshake.request)
    assert key is not None
    digest = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"SEC-WEBSOCKET-ACCEPT:" + base64.b64encode(digest) + b"\r\n\r\n"
    )


def test_the_request_names_target_host_and_own_headers() -> None:
    request = Handshake(ADDRESS, {"Authorization": "Bearer t"}).request
    assert request.startswith(b"GET /ws?x=1 HTTP/1.1\r\nHost: host:8000\r\n")
    assert b"\r\nAuthorization: Bearer t\r\n" in request
    assert request.endswith(b"\r\n\r\n")


def test_each_handshake_has_a_key_of_its_own() -> None:
    assert Handshake(ADDRESS).request != Handshake(ADDRESS).request


def test_a_good_answer_gives_back_what_follows_it() -> None:
    handshake = Handshake(ADDRESS)
    assert handshake.feed(accept(handshake) + b"frames") == b"frames"


def test_an_answer_may_come_byte_by_byte() -> None:
    handshake = Handshake(ADDRESS)
    answer = accept(handshake)
    assert [handshake.feed(answer[i : i + 1]) for i in range(len(answer))] == [None] * (len(answer) - 1) + [b""]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\nno such route", "404 Not Found.*no such route"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "503"),
        (b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: wrong\r\n\r\n", "Sec-WebSocket-Accept"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "Sec-WebSocket-Accept"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "SSH"),
        (b"x" * 70_000, "endless"),
    ],
)
def test_a_server_that_refuses_or_is_none_is_a_failed_connection(answer: bytes, said: str) -> None:
    with pytest.raises(ConnectFailed, match=said):
        Handshake(ADDRESS).feed(answer)


@pytest.mark.parametrize("headers", [{"X": "a\r\nEvil: 1"}, {"X\n": "a"}])
def test_headers_cannot_smuggle_lines(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="line break"):
        Handshake(ADDRESS, headers)


def test_subprotocols_are_offered_and_the_servers_choice_is_kept() -> None:
    offered = Handshake(ADDRESS, None, ["b.v2", "b.v1"])
    assert b"Sec-WebSocket-Protocol: b.v2, b.v1\r\n" in offered.request
    offered.feed(accept(offered)[:-4] + b"\r\nSec-WebSocket-Protocol: b.v1\r\n\r\n")
    assert offered.subprotocol == "b.v1"
    for silent in (Handshake(ADDRESS, None, ["b.v2"]), Handshake(ADDRESS)):
        silent.feed(accept(silent))
        assert silent.subprotocol is None
    surprised = Handshake(ADDRESS, None, ["b.v2"])
    with pytest.raises(ConnectFailed, match="not offered"):
        surprised.feed(accept(surprised)[:-4] + b"\r\nSec-WebSocket-Protocol: chat\r\n\r\n")
