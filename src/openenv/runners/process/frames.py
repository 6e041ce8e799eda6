"""Messages between a server and its worker processes: a header and a payload, one after the other on a stream.

Both sides run the same release, so there is no version in it. Knows bytes only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

HEADER: Final = struct.Struct("<QBQ")
READ_BYTES: Final = 256 * 1024


class Kind(IntEnum):
    """What a message is. `number` in its header is the request's, unless said otherwise here."""

    # From the server.
    SETUP = 1  # what a worker is to know before anything else
    ENCODER = 2  # an encoder of results; `number` is its own
    OPEN = 3  # build an environment
    ASK = 4  # do something with one
    CANCEL = 5  # interrupt a request
    CLOSE = 6  # close an environment
    EXIT = 7  # end

    # From a worker.
    READY = 16  # the factory is loaded
    FAILED = 17  # it could not be
    BYTES = 18  # a result that is bytes already
    VALUE = 19  # a result
    ERROR = 20  # what was raised instead of a result
    EVENT = 21  # progress or a log message of a running tool
    LOG = 22  # a record of the worker's log


class Frame(NamedTuple):
    """One message."""

    kind: int
    number: int
    payload: bytes


def frame(kind: Kind, number: int = 0, payload: bytes = b"") -> bytes:
    """Write a message."""
    return HEADER.pack(len(payload), kind, number) + payload


class FrameReader:
    """Cuts a stream into messages."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take in what came, and return the messages that are whole."""
        buffer = self._buffer
        buffer += data
        place, end = 0, len(buffer)
        while end - place >= HEADER.size:
            size, kind, number = HEADER.unpack_from(buffer, place)
            start = place + HEADER.size
            if end - start < size:
                break
            yield Frame(kind, number, bytes(buffer[start : start + size]))
            place = start + size
        if place:
            del buffer[:place]
