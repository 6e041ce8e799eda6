"""WebSocket frames after the handshake (RFC 6455): bytes to messages, payloads to frames, for either side.

Tuned for the common case, one small whole frame per read. A message over the limit is skipped, not buffered, and
reported. Knows bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

try:
    from websockets.speedups import apply_mask
except ImportError:  # the wheel for this platform has no compiled part
    from websockets.utils import apply_mask


class Opcode(IntEnum):
    """Frame types, and OVERSIZE, our marker for a message that was too large to keep."""

    CONTINUATION = 0x0
    TEXT = 0x1
    BINARY = 0x2
    CLOSE = 0x8
    PING = 0x9
    PONG = 0xA
    OVERSIZE = 0x100


@dataclass(slots=True)
class WebSocketMessage:
    """A whole message or a control frame. For OVERSIZE the payload is empty and `size` is the announced size."""

    opcode: int
    payload: bytes
    size: int = 0


class FrameError(Exception):
    """The peer broke the framing rules; `close_code` is the code to answer with."""

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__(reason)
        self.close_code = close_code
        self.reason = reason


# Made once for the sizes that most replies have: writing a number of two bytes costs more than the rest of a head.
_TEXT_HEADS: Final = (
    *(bytes((0x81, length)) for length in range(126)),
    *(b"\x81\x7e" + length.to_bytes(2, "big") for length in range(126, 1024)),
)


def text_head(length: int) -> bytes:
    """Header of an unmasked text frame."""
    if length < 1024:
        return _TEXT_HEADS[length]
    if length < 65_536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")


def control_frame(opcode: Opcode, payload: bytes = b"") -> bytes:
    """A control frame; its payload is cut at the 125 bytes that the RFC allows (5.5)."""
    payload = payload[:125]
    return bytes((0x80 | opcode, len(payload))) + payload


def close_payload(code: int, reason: str = "") -> bytes:
    """Payload of a close frame (5.5.1)."""
    return code.to_bytes(2, "big") + reason.encode()[:123]


def masked_frame(first: int, payload: bytes, key: bytes) -> bytes:
    """Return a frame as clients send it (5.3).

    Args:
        first: Its first byte: 0x81 for a whole text message, 0x82 for a binary one.
        payload: The message.
        key: Four random bytes.
    """
    length = len(payload)
    if length < 126:
        head = bytes((first, 0x80 | length))
    elif length < 65_536:
        head = bytes((first, 0xFE, length >> 8, length & 0xFF))
    else:
        head = bytes((first, 0xFF)) + length.to_bytes(8, "big")
    return b"".join((head, key, apply_mask(payload, key)))


def masked_text_frame(payload: bytes, key: bytes) -> bytes:
    """Return a text frame as clients send it."""
    return masked_frame(0x81, payload, key)


def masked_control_frame(opcode: Opcode, payload: bytes, key: bytes) -> bytes:
    """Return a control frame as clients send it."""
    payload = payload[:125]
    return bytes((0x80 | opcode, 0x80 | len(payload))) + key + apply_mask(payload, key)


_CHUNK_COST: Final = 64  # bytes of memory per chunk beside its content; a peer may send many tiny chunks


class FrameReader:
    """Cuts a byte stream into messages.

    Args:
        max_size: The largest message to keep, in bytes.
        masked: Whether the peer is a client, whose frames must be masked.
    """

    def __init__(self, max_size: int, *, masked: bool = True) -> None:
        self._max_size = max_size
        self._masked = masked
        self._mask_size = 4 if masked else 0
        self._chunks: list[bytes] = []  # joined once a frame is whole: a large message is copied once, not per read
        self._size = 0
        self._needed = 2  # no use in looking before there are this many bytes
        self._skip = 0  # bytes of a message over the limit that are still to come
        self._fragments = bytearray()  # not a list: millions of tiny pieces would each be an object
        self._fragment_opcode: int | None = None
        self._fragment_size = 0
        self._oversize = 0
        self._skipped_final = True

    @property
    def held(self) -> int:
        """How much memory a message takes that is not whole."""
        return self._size + _CHUNK_COST * len(self._chunks) + len(self._fragments)

    def drop_all(self) -> None:
        """Drop the buffered bytes and all later ones."""
        self._chunks, self._size = [], 0
        self._fragments = bytearray()
        self._skip, self._skipped_final = 1 << 63, False

    def feed(self, data: bytes) -> list[WebSocketMessage]:
        """Take in bytes and return the messages that are complete.

        Raises:
            FrameError: The connection must be closed.
        """
        payload = self.whole(data)
        return [WebSocketMessage(data[0] & 0x0F, payload)] if payload is not None else self._feed_slowly(data)

    def whole(self, data: bytes) -> bytes | None:
        """Return the payload of data that is exactly one short text or binary message; None, and nothing taken, if not.

        Nearly every read is one such message: a caller that treats both kinds alike saves half the cost of `feed`.
        """
        size = len(data)
        if size < 6 or (data[0] != 0x81 and data[0] != 0x82):
            return None
        if self._chunks or self._skip or self._fragment_opcode is not None:
            return None  # a frame or a message has begun and is not complete
        length, start = data[1], 2
        if self._masked:
            length -= 0x80
            start = 6
        if length == 126:
            length = data[2] << 8 | data[3]
            start += 2
        elif not 0 <= length < 126:
            return None
        if size != start + length or length > self._max_size:
            return None
        payload = data[start:]
        return apply_mask(payload, data[start - 4 : start]) if self._masked else payload

    def _feed_slowly(self, data: bytes) -> list[WebSocketMessage]:
        messages: list[WebSocketMessage] = []
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
            if self._skip:
                return messages
            self._end_of_frame(messages)
        self._chunks.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return messages
        buffer = data if len(self._chunks) == 1 else b"".join(self._chunks)
        at = 0
        while (end := self._next_frame(buffer, at, messages)) is not None:
            at = end
        rest = buffer[at:]
        self._chunks, self._size = ([rest] if rest else []), len(rest)
        return messages

    def _next_frame(self, buffer: bytes, at: int, messages: list[WebSocketMessage]) -> int | None:
        """Read the frame at a position; return the position of the next one, or None if this one is incomplete."""
        present = len(buffer) - at
        self._needed = 2
        if present < 2:
            return None
        first, second = buffer[at], buffer[at + 1]
        opcode, final = first & 0x0F, bool(first & 0x80)
        if first & 0x70:
            raise FrameError(1002, "reserved bits are set")
        if bool(second & 0x80) is not self._masked:
            raise FrameError(1002, "client frames must be masked, server frames must not be masked")
        length, head = second & 0x7F, 2
        if length >= 126:
            head = 4 if length == 126 else 10
            if present < head:
                self._needed = head
                return None
            length = int.from_bytes(buffer[at + 2 : at + head], "big")
            if length >> 63:
                raise FrameError(1002, "the most significant bit of a length must be 0 (RFC 6455, 5.2)")
        self._check(opcode, final, length)
        head += self._mask_size
        if opcode < 0x8 and self._fragment_size + length > self._max_size:
            return self._start_skipping(opcode, final, length, buffer, at + head, messages)
        if present < head + length:
            self._needed = head + length
            return None
        start, end = at + head, at + head + length
        if self._masked:
            payload = apply_mask(memoryview(buffer)[start:end], buffer[start - 4 : start])
        else:
            payload = buffer[start:end]
        self._take(opcode, final, payload, messages)
        return end

    def _check(self, opcode: int, final: bool, length: int) -> None:
        if opcode in (Opcode.CLOSE, Opcode.PING, Opcode.PONG):
            if not final or length > 125:
                raise FrameError(1002, "a control frame must be short and whole")
        elif opcode == Opcode.CONTINUATION:
            if self._fragment_opcode is None:
                raise FrameError(1002, "a continuation without a beginning")
        elif opcode in (Opcode.TEXT, Opcode.BINARY):
            if self._fragment_opcode is not None:
                raise FrameError(1002, "a new message inside a fragmented one")
        else:
            raise FrameError(1002, f"unknown opcode {opcode}")

    def _take(self, opcode: int, final: bool, payload: bytes, messages: list[WebSocketMessage]) -> None:
        if opcode >= 0x8 or (final and opcode != Opcode.CONTINUATION):
            messages.append(WebSocketMessage(opcode, payload))
            return
        if opcode != Opcode.CONTINUATION:
            self._fragment_opcode = opcode
        if not self._oversize:
            self._fragments += payload
        self._fragment_size += len(payload)
        if final:
            self._finish_fragments(messages)

    def _start_skipping(
        self, opcode: int, final: bool, length: int, buffer: bytes, start: int, messages: list[WebSocketMessage]
    ) -> int | None:
        if len(buffer) < start:  # the mask key has not arrived; it counts as part of the skipped bytes
            length, start = length + start - len(buffer), len(buffer)
        present = min(len(buffer) - start, length)
        self._skip = length - present
        self._fragments.clear()
        self._oversize = self._fragment_size + length
        if opcode != Opcode.CONTINUATION:
            self._fragment_opcode = opcode
        self._skipped_final = final
        if not self._skip:
            self._end_of_frame(messages)
        return start + present

    def _end_of_frame(self, messages: list[WebSocketMessage]) -> None:
        if self._skipped_final:
            self._finish_fragments(messages)

    def _finish_fragments(self, messages: list[WebSocketMessage]) -> None:
        assert self._fragment_opcode is not None
        if self._oversize:
            messages.append(WebSocketMessage(Opcode.OVERSIZE, b"", size=self._oversize))
        else:
            messages.append(WebSocketMessage(self._fragment_opcode, bytes(self._fragments)))
        self._fragments.clear()
        self._fragment_opcode = None
        self._fragment_size = 0
        self._oversize = 0
