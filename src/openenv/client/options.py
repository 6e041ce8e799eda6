"""What both kinds of connection share: options, mask keys, and how a close frame reads.

Knows bytes; must not know sockets or loops.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from ..protocol.client_sessions import SUBPROTOCOL_JSON
from ..settings import client_token

READ_BYTES = 65_536

ProtocolChoice = Literal["auto", "v1", "v2"]
PROTOCOLS: Final[tuple[str, ...]] = get_args(ProtocolChoice)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect and how long to wait; times in seconds."""

    connect_timeout_s: float = 10.0
    retry_refused_s: float = 2.0
    message_timeout_s: float | None = 60.0
    max_message_bytes: int = 100 * 1024 * 1024
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # a token may be among them
    protocol: ProtocolChoice = "v1"

    @property
    def subprotocols(self) -> tuple[str, ...]:
        """What the handshake offers."""
        return () if self.protocol == "v1" else (SUBPROTOCOL_JSON,)


def with_token(headers: Mapping[str, str] | None, token: str | None) -> dict[str, str]:
    """Return headers with a bearer token; without one, with that of the settings unless they bring their own."""
    found = dict(headers or {})
    named = next((name for name in found if name.lower() == "authorization"), None)
    if token is None and named is None:
        token = client_token()
    if token is not None:
        found.pop(named or "", None)
        found["Authorization"] = f"Bearer {token}"
    return found


class MaskKeys:
    """Random mask keys (RFC 6455, 5.3), fetched from the system many at a time."""

    __slots__ = ("_at", "_pool")

    def __init__(self) -> None:
        self._pool = b""
        self._at = 0

    def next(self) -> bytes:
        """Return four random bytes."""
        if self._at >= len(self._pool):
            self._pool = os.urandom(1024)
            self._at = 0
        self._at += 4
        return self._pool[self._at - 4 : self._at]


def oversize_reason(size: int, options: ConnectionOptions) -> str:
    """Say that a reply was too long, and what would let it through."""
    limit = options.max_message_bytes / (1024 * 1024)
    return f"a reply of {size} bytes is over the limit (max_message_size_mb={limit:g})"


def closed_reason(payload: bytes) -> str:
    """Say what a close frame means."""
    code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
    text = payload[2:].decode("utf-8", "replace")
    return f"the server closed the connection with code {code}" + (f": {text}" if text else "")
