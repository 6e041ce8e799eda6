"""What tells a repeated request from another one with the same id: the message that the first one came in.

The last few messages of each connection are kept as they came, while they are small, and looked into only when an id is
seen again: a client that gives an id away twice must not take the answer to one request for that to the other. Knows
messages and encodings; must not know sessions' lives or sockets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..protocol.v2.server import Writer

KEPT: Final = 4
KEPT_BYTES: Final = 64 * 1024
_TWO_REQUESTS: Final = math.nan  # which is not even equal to itself
_BESIDE: Final = frozenset({"session", "traceparent"})  # what may differ: how it is named, and on whose behalf


class Message:
    """A message that has come, with one request or many."""

    __slots__ = ("_binary", "_contents", "_payload", "writer")

    def __init__(self, writer: Writer, payload: bytes | None, binary: bool) -> None:
        self.writer = writer
        self._payload = payload
        self._binary = binary
        self._contents: dict[tuple[int, str | None], Any] | None = None

    def forget(self) -> None:
        """Keep the message no longer."""
        self._payload = self._contents = None

    def differs(self, other: Message, request_id: int, session: str) -> bool:
        """Whether the request with that id certainly asks for something else in another message."""
        if self.writer is not other.writer:
            return False  # values may look different in another encoding
        here, there = self._content(request_id, session), other._content(request_id, session)
        return here is not None and there is not None and _certainly_differ(here, there)

    def _content(self, request_id: int, session: str) -> Any:
        found = self._contents
        if found is None:  # read once, however many of its requests are repeated
            found = self._contents = {}
            for key, content in self._read():
                known = found.setdefault(key, content)
                if known is not content and _certainly_differ(known, content):
                    found[key] = _TWO_REQUESTS
        return found.get((request_id, session), found.get((request_id, None)))

    def _read(self) -> Iterator[tuple[tuple[int, str | None], Any]]:
        if self._payload is None:
            return
        try:
            message = self.writer.codec.decode(self._payload, binary=self._binary, max_bytes=64 * KEPT_BYTES)
        except ValueError:
            return
        for request in message["requests"] if message.get("type") == "batch" else (message,):
            request_id, session = (request.get("id"), request.get("session")) if isinstance(request, dict) else (0, 0)
            if isinstance(request_id, int) and (session is None or isinstance(session, str)):  # else it was refused
                yield (request_id, session), {key: request[key] for key in request if key not in _BESIDE}


def _certainly_differ(here: Any, there: Any) -> bool:
    try:
        return bool(here != there)
    except Exception:  # arrays do not tell whether they are equal
        return False


class Asked(NamedTuple):
    """What a ledger keeps of a request, to tell others with its id from it; the same for all steps of a batch."""

    kind: str
    message: Message


class Recent:
    """The last messages of one connection."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._messages: deque[Message] = deque()

    def add(self, payload: bytes, binary: bool) -> Message:
        """Note a message; the oldest is let go of."""
        message = Message(self._writer, payload if len(payload) <= KEPT_BYTES else None, binary)
        self._messages.append(message)
        if len(self._messages) > KEPT:
            self._messages.popleft().forget()
        return message
