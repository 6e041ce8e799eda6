"""The head of an HTTP/1.1 request, read from its bytes before a parser sees it (RFC 9112, sections 2 to 6).

`fast` recognizes plain WebSocket upgrades with it; workers and gateways route requests with it. So all of them agree on
the end of a request. Any unusual form is left to the real parser, which reports the error. Knows bytes; must not know
connections or sessions.

    GET /ws?session_id=x HTTP/1.1     method, path, query
    cookie: a=1; b=2                  field patterns: COOKIE, AUTHORIZATION, UPGRADE, OFFERS_V2, ...
    content-length: 12                body_bytes; None if only a parser can tell
                                      the empty line ends the head
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote

from .asgi import MOST_FIELDS, MOST_HEAD_BYTES


def field_pattern(name: bytes, value: bytes = rb"([^\r]*)") -> re.Pattern[bytes]:
    """Return a pattern that finds a header field; by default its first group is the value."""
    return re.compile(rb"\r\n" + name + rb":[ \t]*" + value, re.IGNORECASE)


AUTHORIZATION: Final = field_pattern(b"authorization")
COOKIE: Final = field_pattern(b"cookie")
UPGRADE: Final = field_pattern(b"upgrade", rb"websocket[ \t]*\r\n")
OFFERS_V2: Final = field_pattern(b"sec-websocket-protocol", rb"[^\r]*openenv\.v2\.")
CLOSES: Final = field_pattern(b"connection", rb"[^\r]*\bclose\b")
_CONNECTION_UPGRADE: Final = field_pattern(b"connection", rb"[^\r]*\bupgrade\b")
_SESSIONS: Final = field_pattern(b"x-openenv-sessions", rb"(\d{1,6})")
_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*(?=\r\n)")
_ENDS_ELSEWHERE: Final = re.compile(rb"transfer-encoding|\n(?:expect|upgrade):")
_METHOD: Final = re.compile(rb"[A-Z]{3,7} ")

# A whole request head in its simplest form (RFC 9112, 3 and 5): no folding, nothing before a colon, nothing behind.
_PLAIN_HEAD: Final = re.compile(rb"GET /[!-~]* HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)+\r\n")

_MOST_SESSIONS: Final = 10_000  # a client may announce these; the announced ones keep other sessions away for a while


class RequestHead(NamedTuple):
    """The parts of a request's head that routing needs.

    Args:
        method: The method.
        path: The path, decoded.
        query: The bytes after the `?`.
        raw: The whole head.
        body_bytes: The length of the body; None if only a parser can tell.
    """

    method: bytes
    path: str
    query: bytes
    raw: bytes
    body_bytes: int | None


def is_request(data: bytes) -> bool:
    """Return whether data may be the beginning of a request; if not, let a parser report the error."""
    return _METHOD.match(data[:8]) is not None or (len(data) < 8 and data.isupper())


def is_plain_upgrade(head: bytes) -> bool:
    """Return whether this is one whole WebSocket request within the limits, and nothing else."""
    if len(head) > MOST_HEAD_BYTES or head.count(b"\r\n") > MOST_FIELDS + 2:
        return False
    return bool(UPGRADE.search(head) and _CONNECTION_UPGRADE.search(head) and _PLAIN_HEAD.fullmatch(head))


def read_head(raw: bytes) -> RequestHead | None:
    """Read a whole head including the empty line; None for one that a parser should look at."""
    line, _, _ = raw.partition(b"\r\n")
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[1].startswith(b"/"):
        return None
    target, _, query = parts[1].partition(b"?")
    path = target.decode("latin-1")
    if "%" in path:
        path = unquote(path)
    body_bytes: int | None = None
    lower = raw.lower()
    if _ENDS_ELSEWHERE.search(lower) is None:
        lengths = _CONTENT_LENGTH.findall(lower)
        # In any other form this function and the parser could disagree about the end of the body.
        if len(lengths) > 1 or lower.count(b"content-length") != len(lengths):
            return None
        body_bytes = int(lengths[0]) if lengths else 0
    return RequestHead(parts[0], path, query, raw, body_bytes)


def announced_sessions(head: bytes) -> int:
    """Return how many sessions the client of a WebSocket is about to open, as its handshake says; 1 by default."""
    count = _SESSIONS.search(head)
    return 1 if count is None else min(max(1, int(count[1])), _MOST_SESSIONS)


def value_of(pattern: re.Pattern[bytes], head: bytes) -> str | None:
    """Return the value of a field."""
    match = pattern.search(head)
    return None if match is None else match[1].decode("latin-1").strip()
