"""Matching: which recorded request a new one is, and how it differs from the nearest one where it is none.

Pure. `strict` compares the whole request without ids that are new in every run; `loose` only what was said in the
conversation, with dates, ids and temporary paths made the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Literal

Mode = Literal["strict", "loose"]

_VOLATILE = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "user",
    }
)
_MASKS = (
    (re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"), "<uuid>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<date>"),
    (re.compile(r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]* (?:[A-Z][a-z]{2}) \d{1,2} \d{4}"), "<date>"),
    (re.compile(r"/(?:tmp|var/folders|run/user)/[^\s\"'`<>:]*"), "<path>"),
    (re.compile(r"\b[0-9a-f]{16,}\b"), "<hex>"),
    (re.compile(r"\s+"), " "),
)


def key_of(method: str, path: str, body: Any, mode: Mode = "strict") -> str:
    """Return a text that is the same for requests that are the same."""
    shape = strict_shape(body) if mode == "strict" else loose_shape(body)
    return sha256(json.dumps([method, path, shape], sort_keys=True).encode()).hexdigest()


def strict_shape(body: Any) -> Any:
    """Return a request without what is new in every run: ids of items, names of users and sessions."""
    if not isinstance(body, dict):
        return body
    kept = {name: value for name, value in body.items() if name not in _VOLATILE}
    if isinstance(kept.get("input"), list):
        kept["input"] = [
            {name: value for name, value in item.items() if name != "id"} if isinstance(item, dict) else item
            for item in kept["input"]
        ]
    return kept


def loose_shape(body: Any) -> Any:
    """Return only what was said: the messages but the system's, and whether there were tools and a stream."""
    if not isinstance(body, dict):
        return body
    said = body.get("messages", body.get("input"))
    if said is None:
        return _masked(strict_shape(body))
    if isinstance(said, list):
        said = [_masked(item) for item in said if not _is_system(item)]
    return {"said": _masked(said), "tools": bool(body.get("tools")), "stream": bool(body.get("stream"))}


def difference(recorded: Any, asked: Any) -> str:
    """Return where two requests differ first, and how."""
    for place, one, other in _differences(recorded, asked, "body"):
        return f"{place}: recorded {_short(one)}, asked {_short(other)}"
    return "nothing"


def similarity(recorded: Any, asked: Any) -> float:
    """Return how much two requests have in common, from 0 to 1."""
    one, other = set(_leaves(recorded, "")), set(_leaves(asked, ""))
    return len(one & other) / max(len(one | other), 1)


def _is_system(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") in ("system", "developer")


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        for pattern, mask in _MASKS:
            value = pattern.sub(mask, value)
        return value.strip()
    if isinstance(value, dict):
        dropped = ("id", "cache_control")
        return {name: _masked(item) for name, item in value.items() if name not in dropped}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return value


def _differences(one: Any, other: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            yield from _differences(one.get(name), other.get(name), f"{place}.{name}")
    elif isinstance(one, list) and isinstance(other, list):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from _differences(left, right, f"{place}[{index}]")
        if len(one) != len(other):
            yield f"{place} (length)", len(one), len(other)
    elif one != other:
        yield place, one, other


def _leaves(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{place}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}[{index}]")
    else:
        yield place, repr(value)


def _short(value: Any, limit: int = 160) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[:limit]}..."
