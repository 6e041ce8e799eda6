"""Messages between a program and the workers of its local vector.

    <size of the payload: 4 bytes> <flags: 1> <number of the step: 8> <payload>     on a Unix socket

A step in columns has no payload: actions and results are in shared memory, and each worker gets and sends 13 bytes.
Everything else is a pickled list of requests or replies. Both sides run the same release. Must not know sockets.

    from the program                      from a worker
    STEP    the chosen slots take a step  STEP    the step is done, its results are in the arrays
    EACH    reply as each slot is ready
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

HEADER: Final = struct.Struct("<IBQ")
STEP: Final = 1
EACH: Final = 2

RequestKind = Literal["open", "reset", "step", "state", "defaults"]
ReplyKind = Literal["data", "error", "row", "metadata", "restarted"]


class SlotRequest(NamedTuple):
    """A request for one slot; the reply has the same number.

    `defaults` sets the keywords of later resets within a step, for all slots; it has no reply.
    """

    slot: int
    number: int
    kind: RequestKind
    data: Any


class SlotReply(NamedTuple):
    """An answer of one slot. The number is 0 for a remark on the step in columns.

    data        the reply's data, encoded by the codec
    error       the data of an error
    row         a reset: the observation is in the arrays, this is its metadata
    metadata    of a step in columns
    restarted   the episode ended in this step, and a new one has begun: a `Restart`
    """

    slot: int
    number: int
    kind: ReplyKind
    value: Any


@dataclass(frozen=True, slots=True)
class Restart:
    """An episode's end and the next one's beginning, in one step, with metadata or an error.

    Args:
        final: The metadata of the last result.
        metadata: The metadata of the reset.
        error: The data of the error, if the reset failed.
    """

    final: dict[str, Any]
    metadata: dict[str, Any]
    error: dict[str, Any] | None = None


VectorMessage = tuple[int, int, Sequence[Any]]
"""One message: its flags, the number of the step, and the requests or replies."""


def encode(flags: int, step: int = 0, content: Sequence[Any] = ()) -> bytes:
    """Encode a message."""
    if not content:
        return HEADER.pack(0, flags, step)
    payload = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(payload), flags, step) + payload


class VectorReader:
    """Cuts a stream into messages."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Sequence[VectorMessage]:
        """Add bytes, and return the messages that are complete."""
        buffer = self._buffer
        if not buffer and len(data) == HEADER.size:  # nearly all are
            size, flags, step = HEADER.unpack(data)
            if not size:
                return ((flags, step, ()),)
        buffer += data
        messages: list[VectorMessage] = []
        while len(buffer) >= HEADER.size:
            size, flags, step = HEADER.unpack_from(buffer)
            end = HEADER.size + size
            if len(buffer) < end:
                break
            content = pickle.loads(memoryview(buffer)[HEADER.size : end]) if size else ()
            del buffer[:end]
            messages.append((flags, step, content))
        return messages
