"""WebSocket frames: whole and in pieces, masked and not, fragmented, oversized, broken."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from websockets.frames import Frame
from websockets.frames import Opcode as WireOpcode

from openenv.protocol.frames import (
    FrameError,
    FrameReader,
    Opcode,
    WebSocketMessage,
    close_payload,
    control_frame,
    masked_control_frame,
    masked_text_frame,
    text_head,
)

SIZES = (0, 1, 125, 126, 127, 1023, 1024, 65_535, 65_536, 200_000)


def frame(opcode: int, payload: bytes, *, mask: bool, fin: bool = True) -> bytes:
    """A frame as the `websockets` library writes it."""
    return Frame(WireOpcode(opcode), payload, fin=fin).serialize(mask=mask, extensions=[])


def fed(reader: FrameReader, pieces: Iterable[bytes]) -> list[tuple[int, bytes]]:
    return [(m.opcode, m.payload) for piece in pieces for m in reader.feed(piece)]


@pytest.mark.parametrize("masked", [True, False], ids=["from client", "from server"])
@pytest.mark.parametrize("size", SIZES)
def test_a_whole_message_of_any_size_is_read_at_once(size: int, masked: bool) -> None:
    payload = os.urandom(size)
    for opcode in (Opcode.TEXT, Opcode.BINARY):
        reader = FrameReader(1 << 20, masked=masked)
        assert fed(reader, [frame(opcode, payload, mask=masked)]) == [(opcode, payload)]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 50])
def test_a_stream_cut_anywhere_gives_the_same_messages(cut: int, masked: bool) -> None:
    payloads = [b"a" * n for n in (0, 5, 125, 126, 300)]
    stream = b"".join(frame(1, payload, mask=masked) for payload in payloads)
    pieces = [stream[i : i + cut] for i in range(0, len(stream), cut)]
    assert [payload for _, payload in fed(FrameReader(1 << 20, masked=masked), pieces)] == payloads


def test_several_frames_in_one_read_come_out_in_order() -> None:
    stream = b"".join(frame(1, str(i).encode(), mask=True) for i in range(50))
    assert [payload for _, payload in fed(FrameReader(100), [stream])] == [str(i).encode() for i in range(50)]


@pytest.mark.parametrize("size", SIZES)
def test_what_our_client_writes_our_server_and_the_websockets_library_read(size: int) -> None:
    payload = os.urandom(size)
    key = os.urandom(4)
    assert fed(FrameReader(1 << 20), [masked_text_frame(payload, key)]) == [(Opcode.TEXT, payload)]
    assert len(masked_text_frame(payload, key)) == len(frame(1, payload, mask=True))


@pytest.mark.parametrize("size", SIZES)
def test_the_head_of_a_server_frame_is_that_of_the_websockets_library(size: int) -> None:
    payload = b"x" * size
    assert text_head(size) + payload == frame(1, payload, mask=False)


def test_a_fragmented_message_is_joined_and_control_frames_between_pass() -> None:
    pieces = [
        frame(1, b"one ", mask=True, fin=False),
        frame(9, b"ping", mask=True),
        frame(0, b"two ", mask=True, fin=False),
        frame(0, b"three", mask=True),
    ]
    expected = [(Opcode.PING, b"ping"), (Opcode.TEXT, b"one two three")]
    assert fed(FrameReader(100), pieces) == expected
    assert fed(FrameReader(100), [b"".join(pieces)]) == expected


def test_after_a_fragmented_message_the_next_one_is_read_as_usual() -> None:
    reader = FrameReader(100)
    pieces = [frame(2, b"a", mask=True, fin=False), frame(0, b"b", mask=True), frame(1, b"next", mask=True)]
    assert fed(reader, pieces) == [(Opcode.BINARY, b"ab"), (Opcode.TEXT, b"next")]


@pytest.mark.parametrize("cut", [None, 10])
def test_a_message_over_the_limit_is_skipped_reported_and_followed_by_the_next(cut: int | None) -> None:
    reader = FrameReader(100)
    stream = frame(1, b"x" * 101, mask=True) + frame(1, b"y" * 100, mask=True)
    pieces = [stream] if cut is None else [stream[i : i + cut] for i in range(0, len(stream), cut)]
    messages = [message for piece in pieces for message in reader.feed(piece)]
    assert messages == [WebSocketMessage(Opcode.OVERSIZE, b"", size=101), WebSocketMessage(Opcode.TEXT, b"y" * 100)]


def test_fragments_that_add_up_to_too_much_are_one_oversized_message() -> None:
    reader = FrameReader(100)
    pieces = [
        frame(1, b"x" * 60, mask=True, fin=False),
        frame(0, b"x" * 60, mask=True, fin=False),
        frame(9, b"!", mask=True),
        frame(0, b"x" * 60, mask=True, fin=False),
        frame(0, b"", mask=True),
        frame(1, b"ok", mask=True),
    ]
    messages = [message for piece in pieces for message in reader.feed(piece)]
    assert [message.opcode for message in messages] == [Opcode.PING, Opcode.OVERSIZE, Opcode.TEXT]
    assert messages[1].size > 100
    assert messages[2].payload == b"ok"


def test_an_oversized_message_is_never_buffered() -> None:
    reader = FrameReader(1000)
    head = frame(1, b"", mask=True)[:1] + bytes((0x80 | 127,)) + (1 << 40).to_bytes(8, "big") + b"key!"
    assert reader.feed(head) == []
    for _ in range(64):
        assert reader.feed(b"z" * 65_536) == []
    assert len(reader._chunks) == 0


@pytest.mark.parametrize("opcode", [Opcode.CLOSE, Opcode.PING, Opcode.PONG])
@pytest.mark.parametrize("masked", [True, False])
def test_control_frames_pass_with_their_payload(opcode: Opcode, masked: bool) -> None:
    raw = masked_control_frame(opcode, b"hello", b"key!") if masked else control_frame(opcode, b"hello")
    assert raw == frame(opcode, b"hello", mask=False) or masked
    assert fed(FrameReader(1, masked=masked), [raw]) == [(opcode, b"hello")]


def test_payloads_of_control_frames_are_cut_at_what_is_allowed() -> None:
    assert len(control_frame(Opcode.PING, b"x" * 300)) == 127
    assert len(masked_control_frame(Opcode.PONG, b"x" * 300, b"key!")) == 131
    assert close_payload(1000, "é" * 200)[:2] == (1000).to_bytes(2, "big")
    assert len(close_payload(1000, "x" * 200)) == 125


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (bytes((0xC1, 0x80)) + b"key!", "reserved"),
        (bytes((0x81, 0x01)) + b"x", "masked"),
        (bytes((0x09, 0x80)) + b"key!", "control"),
        (bytes((0x89, 0xFE, 0, 126)) + b"key!" + b"x" * 126, "control"),
        (frame(0, b"x", mask=True), "continuation"),
        (frame(1, b"x", mask=True, fin=False) + frame(1, b"y", mask=True), "new message"),
        (bytes((0x83, 0x80)) + b"key!", "opcode"),
        (bytes((0x8B, 0x80)) + b"key!", "opcode"),
    ],
    ids=["rsv", "unmasked", "fragmented control", "long control", "continuation", "interleaved", "0x3", "0xB"],
)
def test_a_client_that_breaks_the_rules_gets_a_protocol_error(raw: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said) as caught:
        FrameReader(1000).feed(raw)
    assert caught.value.close_code == 1002


def test_a_server_must_not_mask() -> None:
    with pytest.raises(FrameError, match="masked"):
        FrameReader(1000, masked=False).feed(frame(1, b"hello", mask=True))
