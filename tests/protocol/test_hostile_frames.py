"""Frames that are made to harm: very many pieces of one message, and lengths that no frame may have."""

from __future__ import annotations

import tracemalloc

import pytest

from openenv.protocol.frames import FrameError, FrameReader, Opcode, WebSocketMessage

START, MIDDLE, END = b"\x01", b"\x00", b"\x80"
KEY = bytes(4)  # a mask that changes nothing


def piece(first: bytes, payload: bytes) -> bytes:
    return first + bytes((0x80 | len(payload),)) + KEY + payload


@pytest.mark.parametrize("payload", [b"", b"x"], ids=["empty", "a byte"])
def test_pieces_take_no_more_than_their_bytes(payload: bytes) -> None:
    reader = FrameReader(1_000_000)
    many = piece(MIDDLE, payload) * 1000
    reader.feed(piece(START, payload))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            assert reader.feed(many) == []
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 100_000  # for 20,000 pieces
    assert reader.feed(piece(END, b"!")) == [WebSocketMessage(Opcode.TEXT, payload * 20_001 + b"!")]


def test_pieces_of_binary_messages_are_bytes_when_they_are_whole() -> None:
    reader = FrameReader(1000)
    assert reader.feed(piece(b"\x02", b"ab") + piece(END, b"cd")) == [WebSocketMessage(Opcode.BINARY, b"abcd")]
    assert type(reader.feed(piece(b"\x02", b"ab") + piece(END, b"cd"))[0].payload) is bytes


@pytest.mark.parametrize("masked", [True, False], ids=["from a client", "from a server"])
@pytest.mark.parametrize("length", [2**63, 2**64 - 1])
@pytest.mark.parametrize("cut", [1, 4, 14])
def test_a_length_with_its_top_bit_set_is_a_protocol_error(masked: bool, length: int, cut: int) -> None:
    reader = FrameReader(1000, masked=masked)
    head = b"\x81" + bytes((0x7F | (0x80 if masked else 0),)) + length.to_bytes(8, "big") + KEY
    with pytest.raises(FrameError) as caught:
        for start in range(0, len(head), cut):
            reader.feed(head[start : start + cut])
    assert caught.value.close_code == 1002


def test_the_longest_length_is_skipped_as_any_message_over_the_limit() -> None:
    reader = FrameReader(1000)
    assert reader.feed(b"\x81\xff" + (2**63 - 1).to_bytes(8, "big") + KEY + b"abc") == []
