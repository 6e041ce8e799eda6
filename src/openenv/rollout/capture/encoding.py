"""JSON and server-sent events, as the capture proxy reads and writes them: fast, and tolerant of what agents send."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json, to_json

Json = dict[str, Any]
"""A JSON object."""


def loads(data: bytes | str, *, deep: bool = True) -> Any:
    """Parse JSON; without `deep`, only what is nested less than 200 times.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
        RecursionError: it is nested more deeply than Python's stack is.
    """
    try:
        return from_json(data)
    except ValueError as exc:  # lone surrogates, for one: odd, but agents send them
        if not deep and "recursion limit" in str(exc):
            raise ValueError("it is nested too deeply") from None
        return json.loads(data)


def dumps(value: Any) -> bytes:
    """Write compact JSON."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":")).encode()


def load_object(data: bytes | str) -> Json | None:
    """Parse JSON, and return it where it is an object; None for anything else."""
    try:
        value = loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_LONGEST_END = 4


class EventSplitter:
    """Cuts a stream into whole events; the start of the next one waits for its end."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, and return the events that are whole now, each with the blank line that ends it."""
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
        """Return what is left of an event that never ended."""
        return bytes(self._buffer)

    def __len__(self) -> int:
        """Return how many bytes wait for the end of their event."""
        return len(self._buffer)


def event_data(event: bytes) -> bytes | None:
    """Return the data of an event, its lines joined; None where it has none (a comment, a keep-alive)."""
    if event.startswith(b"data: ") and event.count(b"\n") <= 2 and b"\r" not in event:
        return event[6:].rstrip(b"\n")
    lines = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines) if lines else None


def event_bytes(data: bytes, *, name: str | None = None) -> bytes:
    """Write an event whose data is one line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


STREAM_DONE = b"[DONE]"
"""The data of the event that ends a chat completion stream."""


_DEEPEST = 32


def writable(value: Any, depth: int = 0) -> Any:
    """Return a value that can be written as JSON; agents choose file names and can make endpoints quote anything.

    Characters that UTF-8 cannot encode become escapes. Values that are nested too deeply become an ellipsis.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict | list | tuple) and depth >= _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {writable(key): writable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [writable(item, depth + 1) for item in value]
    return value
