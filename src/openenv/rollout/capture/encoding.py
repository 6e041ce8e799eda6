"""JSON and server-sent events for the capture proxy: fast, and tolerant of the input of agents.

The only place that parses or writes events. The format is the HTML standard's, section 9.2: lines of fields, a blank
line ends an event.
"""

#   data: {"a":1}\n          an event: `event_data` returns {"a":1}
#   \n
#   : waiting\n\n           a comment: `event_data` returns None
#   data: {"b"              the start of the next one: `EventSplitter` keeps it until its end arrives

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json, to_json

Json = dict[str, Any]
"""A JSON object."""


def loads(data: bytes | str, *, deep: bool = True) -> Any:
    """Parse JSON; without `deep`, refuse values that are nested 200 times or more.

    Raises:
        ValueError: The data is not JSON, or nested too deeply.
        RecursionError: The value is nested more deeply than Python's stack.
    """
    try:
        return from_json(data)
    except ValueError as exc:  # for example lone surrogates, which agents do send
        if not deep and "recursion limit" in str(exc):
            raise ValueError("it is nested too deeply") from None
        return json.loads(data)


# `to_json` is several times faster than `json.dumps`, but refuses lone surrogates; JSON escapes them.
def dumps(value: Any) -> bytes:
    """Write compact JSON."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":")).encode()


def load_object(data: bytes | str) -> Json | None:
    """Parse a JSON object; None for anything else."""
    try:
        value = loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_LONGEST_END = 4


# Carriage returns count as line ends, and both kinds may be mixed: some gateways rewrite line ends of single lines.
class EventSplitter:
    """Cuts a stream into whole events, and keeps the start of the next one until its end arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, and return the events that are complete now, each with its blank line."""
        self._buffer += data
        events: list[bytes] = []
        start = 0
        position = self._searched
        while match := _END.search(self._buffer, position):
            events.append(bytes(self._buffer[start : match.end()]))
            start = position = match.end()
        if start:
            del self._buffer[:start]
        self._searched = max(0, len(self._buffer) - _LONGEST_END)
        return events

    def rest(self) -> bytes:
        """Return the start of an event that never ended."""
        return bytes(self._buffer)

    def __len__(self) -> int:
        """Return the number of bytes that wait for the end of their event."""
        return len(self._buffer)


def event_data(event: bytes) -> bytes | None:
    """Return the data of an event, its lines joined; None without data (a comment, a keep-alive)."""
    # Nearly all events are one line of data: no need to split it.
    if event.startswith(b"data: ") and event.count(b"\n") <= 2 and b"\r" not in event:
        return event[6:].rstrip(b"\n")
    lines = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines) if lines else None


def event_bytes(data: bytes, *, name: str | None = None) -> bytes:
    """Write an event with one line of data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


STREAM_DONE = b"[DONE]"
"""The data of the event that ends a chat completion stream."""
