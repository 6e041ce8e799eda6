"""The two ways to write protocol v2 messages, JSON and MessagePack, each with optional compression.

A codec turns a message into the payload of one frame and back; it says which kind of frame that is. Knows encodings;
must not know what messages mean. `SUBPROTOCOLS` and `choose` are the negotiation.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from .binary_values import ARRAY_TYPE, ArrayParts, array_of, array_parts, cleaned, is_array, is_plain
from .json_values import TooManyValues, ValueLimit, encode

try:
    import msgpack
except ImportError:  # an installation may do without; JSON is spoken then
    msgpack = None


MAX_MESSAGE_BYTES: Final = 100 * 1024 * 1024
_CHECKED_BYTES: Final = 4096
# Of the lists in an array: `[dtype, shape, bytes]`, and at most that many lengths in the shape.
_ARRAY_LIMIT: Final = ValueLimit(values=64, containers=2)
_SMALL_ARRAY: Final = 256  # bytes
_LEVEL: Final = 1  # text shrinks nearly as much as with 6, in a third of the time
_FREE_CONTENT: Final = 1024 * 1024
_MOST_RATIO: Final = 200


QUICK_CONTENT: Final = 1024 * 1024
"""Content up to this size is unpacked in a millisecond or two; a server unpacks more outside of its event loop."""


class ContentTooLarge(ValueError):
    """A compressed message holds more than allowed."""


class Payload(NamedTuple):
    """What goes into a frame, and which kind of frame it is."""

    data: bytes
    binary: bool


class Codec(ABC):
    """One way to write messages."""

    name: str
    """The subprotocol."""
    is_binary: bool
    """Whether uncompressed messages are binary frames."""
    _mark = b""  # precedes a compressed payload

    @abstractmethod
    def encode(self, message: Mapping[str, Any]) -> bytes:
        """Write a message; never raises for a value that has no encoding."""

    @abstractmethod
    def batch(self, replies: Sequence[bytes], batch_id: int | None = None) -> bytes:
        """Write a `batch` answer of replies that are encoded already."""

    @abstractmethod
    def decode(
        self, payload: bytes, *, binary: bool, max_bytes: int = MAX_MESSAGE_BYTES, limit: ValueLimit | None = None
    ) -> dict[str, Any]:
        """Read a message.

        Args:
            payload: The content of a frame.
            binary: Whether it was a binary frame.
            max_bytes: The largest message to unpack from a compressed one.
            limit: The limit on values for a client's message; None for a server's, which is trusted.

        Raises:
            ValueError: The payload is not a valid message.
        """

    def is_compressed(self, payload: bytes, *, binary: bool) -> bool:
        """Whether a payload is to be unpacked before it is read."""
        return binary and payload.startswith(self._mark)

    def unpacked(self, payload: bytes, max_bytes: int, *, is_trusted: bool = False) -> bytes:
        """Return the content of a compressed payload.

        Args:
            payload: The payload.
            max_bytes: The largest content.
            is_trusted: Whether the content may be of any ratio to the payload; clients trust their server.

        Raises:
            ContentTooLarge: Its content is larger than `max_bytes` or the ratio allows.
            ValueError: The payload is damaged.
        """
        data = memoryview(payload)[len(self._mark) :]
        return _decompressed(data, max_bytes if is_trusted else min(max_bytes, largest_content(len(data))))

    def compressed(self, payload: bytes, threshold: int | None) -> Payload:
        """Compress a payload of at least `threshold` bytes if that makes it smaller; None never compresses."""
        if threshold is not None and len(payload) >= threshold:
            small = zlib.compress(payload, _LEVEL)
            if len(small) + 1 < len(payload):
                return Payload(self._mark + small, True)
        return Payload(payload, self.is_binary)

    def __repr__(self) -> str:
        return f"<codec {self.name}>"


class _Json(Codec):
    name = "openenv.v2.json"
    is_binary = False

    def encode(self, message: Mapping[str, Any]) -> bytes:
        try:
            return encode(message)
        except Exception:  # encode field by field, because one of them has no encoding
            return encode(cleaned(message, lambda parts: array_of(list(parts))))

    def batch(self, replies: Sequence[bytes], batch_id: int | None = None) -> bytes:
        head = b"" if batch_id is None else b'"id":%d,' % batch_id
        return b"".join((b'{"type":"batch",', head, b'"replies":[', b",".join(replies), b"]}"))

    def decode(
        self, payload: bytes, *, binary: bool, max_bytes: int = MAX_MESSAGE_BYTES, limit: ValueLimit | None = None
    ) -> dict[str, Any]:
        text = self.unpacked(payload, max_bytes, is_trusted=limit is None) if binary else payload
        if limit is not None:
            limit.check(text)
        return _map_of(from_json(text, cache_strings="keys"))


class _MsgPack(Codec):
    name = "openenv.v2.msgpack"
    is_binary = True
    _mark = b"\xc1"  # the one byte that no MessagePack value begins with

    def encode(self, message: Mapping[str, Any]) -> bytes:
        try:
            if is_plain(message):
                return _pack(message)
        except Exception:  # nested too deeply, an integer too long, text that is none
            pass
        return _pack(cleaned(message, _pack_array))

    def batch(self, replies: Sequence[bytes], batch_id: int | None = None) -> bytes:
        packer = msgpack.Packer()
        head = packer.pack_map_header(2 if batch_id is None else 3) + _pack("type") + _pack("batch")
        if batch_id is not None:
            head += _pack("id") + _pack(batch_id)
        return b"".join((head, _pack("replies"), packer.pack_array_header(len(replies)), *replies))

    def decode(
        self, payload: bytes, *, binary: bool, max_bytes: int = MAX_MESSAGE_BYTES, limit: ValueLimit | None = None
    ) -> dict[str, Any]:
        if not binary:
            raise ValueError("a text frame, where MessagePack in binary frames was agreed on")
        if self.is_compressed(payload, binary=True):
            payload = self.unpacked(payload, max_bytes, is_trusted=limit is None)
        try:
            message = _unpack(payload, limit)
        except TooManyValues:
            raise
        except ValueError as exc:
            raise ValueError(f"not MessagePack: {str(exc)[:200] or type(exc).__name__}") from None
        except Exception as exc:  # dates out of range, keys that have no hash
            raise ValueError(f"not MessagePack: {type(exc).__name__}: {str(exc)[:200]}") from None
        return _map_of(message)


def pack_plain(value: Any) -> bytes:
    """Write numbers, text, lists and maps with keys of text as MessagePack, without looking."""
    packed: bytes = msgpack.packb(value)
    return packed


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_pack_other)
    return packed


def _pack_other(value: Any) -> Any:
    """Convert a value that the packer does not know; arrays come first, because they are by far the most common."""
    parts = array_parts(value) if is_array(value) else None
    return cleaned(value, _pack_array) if parts is None else _pack_array(parts)


def _pack_array(parts: ArrayParts) -> Any:
    dtype, shape, data = parts
    return msgpack.ExtType(ARRAY_TYPE, _array_head(dtype, tuple(shape), len(data)) + data)


@lru_cache(maxsize=256)
def _array_head(dtype: str, shape: tuple[int, ...], size: int) -> bytes:
    """Return what stands before the bytes of an array in `[dtype, shape, bytes]`.

    Written once for each kind of array: a second packer inside the first costs more than all the rest of a small
    observation, since each allocates 256 KiB.
    """
    # `bin` has a length of 1, 2 or 4 bytes.
    if size <= 0xFF:
        layout, mark = ">BB", 0xC4
    elif size <= 0xFFFF:
        layout, mark = ">BH", 0xC5
    else:
        layout, mark = ">BI", 0xC6
    return b"".join((b"\x93", pack_plain(dtype), pack_plain(list(shape)), struct.pack(layout, mark, size)))


def _unpack(payload: bytes, limit: ValueLimit | None) -> Any:
    options: dict[str, Any] = {"ext_hook": _unpack_extension, "timestamp": 3}
    if limit is not None and len(payload) > _CHECKED_BYTES:
        # A list is allocated as long as its header claims, before its items are read: 5 bytes for each level of nested
        # lists could claim as many items as the message has bytes. `skip` reads the message once and builds nothing.
        reader = msgpack.Unpacker(max_buffer_size=len(payload))
        reader.feed(payload)
        try:
            reader.skip()
        except msgpack.OutOfData:
            raise ValueError("Unpack failed: incomplete input") from None
    if limit is not None and len(payload) > limit.containers:
        options |= _counting_hooks(limit)
    return msgpack.unpackb(payload, **options)


def _counting_hooks(limit: ValueLimit) -> dict[str, Any]:
    """Return options of `unpackb` that count lists, maps and their elements, and stop at the limit."""
    values = containers = 0

    def count(container: Any) -> Any:
        nonlocal values, containers
        containers += 1
        values += len(container)
        limit.check_counts(values, containers)
        return container

    most = {"max_array_len": limit.values, "max_map_len": limit.values}  # the largest one is whole before it is counted
    return {"list_hook": count, "object_hook": count, **most}


def _unpack_extension(code: int, data: bytes) -> Any:
    if code != ARRAY_TYPE:
        raise ValueError(f"unknown extension type {code}")
    # A few bytes cannot hold more lists and values than the limit by much, and counting costs more than reading them.
    limits = {} if len(data) <= _SMALL_ARRAY else _counting_hooks(_ARRAY_LIMIT)
    return array_of(msgpack.unpackb(data, **limits, max_ext_len=0))


def _map_of(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")
    return message


def largest_content(size: int) -> int:
    """Return the largest content of a client's compressed message: 1 MiB, or 200 times the compressed size.

    zlib reaches a ratio of 1,000 for zeros, so 100 KB of a client could take 100 MB of memory, again and again. Real
    observations, even of black frames with some pixels, stay below 200.
    """
    return max(_FREE_CONTENT, _MOST_RATIO * size)


def _decompressed(data: bytes | memoryview, max_bytes: int) -> bytes:
    """Decompress data, but never more than allowed: a few kilobytes can expand to gigabytes of zeros."""
    unpacker = zlib.decompressobj()
    try:
        whole = unpacker.decompress(data, max_bytes + 1)
    except zlib.error:
        raise ValueError("a compressed message that is not zlib") from None
    if len(whole) > max_bytes:
        raise ContentTooLarge(f"a compressed message of {len(data)} bytes holds more than {max_bytes} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("a compressed message that is cut off, or followed by something")
    return whole


JSON: Final[Codec] = _Json()
MSGPACK: Final[Codec] = _MsgPack()

BY_NAME: Final[Mapping[str, Codec]] = {
    codec.name: codec for codec in (MSGPACK, JSON) if codec is JSON or msgpack is not None
}
SUBPROTOCOLS: Final[tuple[str, ...]] = tuple(BY_NAME)
"""The codecs of this installation, the preferred one first."""


def choose(offered: Iterable[str]) -> Codec | None:
    """Return the first supported codec among a client's subprotocols; None if the client does not speak v2."""
    return next((BY_NAME[name] for name in offered if name in BY_NAME), None)
