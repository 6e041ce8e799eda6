"""How sessions end, and what clients are told of it: the reasons of `SESSION_LOST` and of `detached`.

Knows words only; the words are part of the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..runners.base import WORKER_CRASHED as WORKER_CRASHED

CLOSED: Final = "closed"
EXPIRED: Final = "expired"
EVICTED: Final = "evicted"
SHUTTING_DOWN: Final = "server shutting down"
RESTARTED: Final = "server restarted"
UNKNOWN: Final = "unknown"
UNANSWERED: Final = "the first reset was not answered"
NOT_BEGUN: Final = "its first episode could not begin"

# What logs and metrics tell apart, and clients need not.
CLOSED_BY_CLIENT: Final = "closed by the client"
DISCONNECTED: Final = "client disconnected"
CANCELLED: Final = "cancelled while it was created"

# Why a connection no longer holds a session that goes on.
TAKEN_OVER: Final = "another connection has attached to it"

TOLD: Final = (CLOSED, EXPIRED, EVICTED, SHUTTING_DOWN, RESTARTED, UNKNOWN, UNANSWERED, NOT_BEGUN, WORKER_CRASHED)
"""All reasons that clients of this server can be told, but for those of an operator's own."""

_TOLD_AS: Mapping[str, str] = {CLOSED_BY_CLIENT: CLOSED, DISCONNECTED: EXPIRED, CANCELLED: CLOSED}


def ending(reason: str | None) -> str:
    """Name the reason of an end as clients know it; None is a session that was closed without one."""
    return CLOSED if reason is None else _TOLD_AS.get(reason, reason)
