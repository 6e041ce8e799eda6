"""A message in very many pieces costs no more memory than the message."""

from __future__ import annotations

import tracemalloc

import pytest

from openenv.protocol.frames import FrameReader, Opcode, WebSocketMessage

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
