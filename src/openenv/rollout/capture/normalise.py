"""Requests without their accidents: times, durations and random IDs, which differ when the same work is done again.

Two requests with the same digest ask the same. A resumed rollout finds recorded answers by it, and the comparison of
two rollouts ignores these differences. Values only.
"""

# Sample, in the prompt of a coding agent and in the output of its tools:
#
#   Today's date: Thu Nov 19 2026        Today's date: <time>
#   4 passed in 0.03s                    4 passed in <duration>
#   /tmp/pytest-of-user/pytest-0/x       /tmp/<name>/pytest-0/x
#   ses_6f3aK2mNQxx9Lw                   <id>
#
# A rule may be too wide: it only decides which recorded answer fits, and a conversation that differs in nothing else
# has the same next answer. A rule that is missing costs a divergence, which is reported.

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from .encoding import dumps

ACCIDENTAL_FIELDS = frozenset({"metadata", "client_metadata", "user", "prompt_cache_key", "safety_identifier"})
"""Parameters with IDs of sessions and users."""
_WEEKDAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?!\d)(?: ?[AaPp][Mm]\b)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[A-Z]{3,4}|[+-]\d{2}:?\d{2})\b)?"
_DAY = (
    rf"(?:\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}/\d{{1,2}}/\d{{4}}|\d{{1,2}} {_MONTH} \d{{4}}"
    rf"|{_MONTH} {{1,2}}\d{{1,2}},? \d{{4}}\b|{_MONTH} {{1,2}}\d{{1,2}})"
)
_RULES: tuple[tuple[str, str], ...] = (
    (r"(?<![0-9a-fA-F])[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?![0-9a-fA-F])", "<id>"),
    (r"\b(?:127\.0\.0\.1|localhost):\d{4,5}\b", "<host>"),
    (rf"(?:{_WEEKDAY},? )?\b{_DAY}(?:[T ,]+(?:at )?{_CLOCK}{_ZONE}(?: \d{{4}}\b)?)?", "<time>"),
    (rf"\b{_CLOCK}{_ZONE}", "<time>"),
    (r"\b1[5-9]\d{8}(?:\d{3}){0,3}(?:\.\d+)?\b", "<time>"),  # seconds to nanoseconds since 1970
    (
        r"\b\d+(?:\.\d+)?(?:e-?\d+)? ?(?:[munµ]s|s|secs?|seconds?|m(?:in(?:ute)?s?)?|milliseconds?|microseconds?)\b",
        "<duration>",
    ),
    (r"\b0x[0-9a-fA-F]{6,}\b", "<id>"),  # the address of an object
    (r"(?<=/tmp/)[\w.-]+", "<name>"),
    (r"(?<![A-Za-z0-9])(?=[0-9a-f]*\d)[0-9a-f]{12,}(?:_\d+)?\b", "<id>"),
    (r"\b[A-Za-z]{2,12}[_-](?=\w*\d)[A-Za-z0-9]{10,}(?:_\d+)?\b", "<id>"),
    # Git's short names of commits, which contain the time: "[main ab12cd3] fix", "ab12cd3 fix".
    (r"(?<![\w.])(?:(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,11}(?![\w.])|(?<= )\d{7}(?=\]))", "<id>"),
    (r"(?m:^)\d{7}(?= )", "<id>"),
    (r"\b(?i:pid)[ =:]+\d+", "<pid>"),
    # Codex: "Chunk ID: df09a6", "with session ID 4711"; Claude Code: "running in background with ID: bq7k2m"
    (r"\b(?i:(?:chunk|session|shell|task|agent|process|with) id)(?:: ?[\w-]+| \d+)", "<id>"),
)
_PATTERN = re.compile("|".join(f"(?P<r{number}>{rule})" for number, (rule, _) in enumerate(_RULES)))
_NAMES = {f"r{number}": name for number, (_, name) in enumerate(_RULES)}


def normalised(value: Any) -> Any:
    """Return a JSON value with a placeholder for each time, duration and random ID in its texts."""
    if isinstance(value, str):
        return _PATTERN.sub(lambda match: _NAMES[match.lastgroup or ""], value)
    if isinstance(value, Mapping):
        return {key: normalised(item) for key, item in value.items()}
    return [normalised(item) for item in value] if isinstance(value, list | tuple) else value


def digest(value: Any) -> str:
    """Return the digest of a JSON value, in which the order of keys does not count."""
    return hashlib.sha256(dumps(_sorted(value))).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


class RequestDigests:
    """The digests of requests. A message that many requests repeat is normalised once."""

    def __init__(self) -> None:
        self._items: dict[bytes, str] = {}  # the digest of each item, by its JSON

    def of(self, dialect: str, request: Mapping[str, Any]) -> str:
        """Return the digest of an agent's request."""
        parts = {
            name: [self._item(item) for item in value] if isinstance(value, list) else self._item(value)
            for name, value in request.items()
            if name not in ACCIDENTAL_FIELDS
        }
        return digest([dialect, parts])

    def _item(self, item: Any) -> str:
        text = dumps(item)
        key = hashlib.sha256(text).digest() if len(text) > 64 else text
        if key not in self._items:
            self._items[key] = digest(normalised(item))
        return self._items[key]
