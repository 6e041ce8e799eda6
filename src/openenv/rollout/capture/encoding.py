"""JSON as the capture proxy reads and writes it: fast, and tolerant of what agents really send.

Knows JSON only.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json, to_json

Json = dict[str, Any]
"""A JSON object."""


def loads(data: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return from_json(data)
    except ValueError:  # lone surrogates, for one: odd, but agents send them
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
