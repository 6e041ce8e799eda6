"""How long sessions live and why they end: limits, leases, the reaper, and the reasons that clients get to know.

The reasons are part of the protocol (docs/protocol.md: `SESSION_LOST` and `detached`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..runners.base import WORKER_CRASHED as WORKER_CRASHED
from .session import Session, SessionKind

CLOSED: Final = "closed"
EXPIRED: Final = "expired"
EVICTED: Final = "evicted"
SHUTTING_DOWN: Final = "server shutting down"
RESTARTED: Final = "server restarted"
UNKNOWN: Final = "unknown"
UNANSWERED: Final = "the first reset was not answered"
NOT_BEGUN: Final = "its first episode could not begin"

# Logs and metrics distinguish these from the above; clients need not.
CLOSED_BY_CLIENT: Final = "closed by the client"
DISCONNECTED: Final = "client disconnected"
CANCELLED: Final = "cancelled while it was created"
_CLIENT_REASON_OF: Mapping[str, str] = {CLOSED_BY_CLIENT: CLOSED, DISCONNECTED: EXPIRED, CANCELLED: CLOSED}

# Why a connection no longer holds a session that goes on.
TAKEN_OVER: Final = "another connection has attached to it"

_LEASED: Final = frozenset({SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE})


def client_reason(reason: str | None) -> str:
    """Return a session's close reason as clients know it; None is a session that was closed without one."""
    return CLOSED if reason is None else _CLIENT_REASON_OF.get(reason, reason)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions a server holds, and how long each may be unused. Times are in seconds.

    Args:
        sessions: Environments held at once.
        idle_s: Life of an unused HTTP session.
        soft_idle_s: Life of an unused soft session, and of an HTTP session whose client has left.
        soft_sessions: Soft sessions kept at once.
        grace_s: Life of a detached session.
        queue: How many clients may wait for a slot.
        agents: Sessions held at once that agents have opened; None for no such limit.
        closing_wait_s: How long a client waits for a slot whose session is already closing.
        drain_s: How long a shutdown waits for running calls.
    """

    sessions: int = 1
    idle_s: float = 900.0
    soft_idle_s: float = 60.0
    soft_sessions: int = 8
    grace_s: float = 60.0
    queue: int = 10_000
    agents: int | None = None
    closing_wait_s: float = 5.0
    drain_s: float = 10.0

    @property
    def reaper_period_s(self) -> float:
        """How often to look for expired leases: four times in the shortest one."""
        leases = [self.idle_s, self.soft_idle_s]
        return max(0.05, min([*leases, self.grace_s] if self.grace_s > 0 else leases) / 4)


def life_s(session: Session, limits: SessionLimits) -> float:
    """Return the lease of a session: how long it may be unused."""
    if session.kind is SessionKind.RESUMABLE:
        return limits.grace_s
    is_soft = session.kind is SessionKind.SOFT or session.client_left
    return limits.soft_idle_s if is_soft else limits.idle_s


def close_expired(sessions: Iterable[Session], limits: SessionLimits, now: float) -> bool:
    """Close sessions whose lease is over; return whether any are left to watch.

    A session that a connection holds, or that runs a call, never expires.
    """
    leased = [session for session in sessions if session.kind in _LEASED]
    for session in leased:
        unused_s = now - session.last_activity_at
        if session.is_idle and not session.is_attached and unused_s > life_s(session, limits):
            session.close(EXPIRED)
    return bool(leased)


class Reaper:
    """Calls `look` periodically until it returns False.

    It starts with the first session to watch, on the loop that opened that session, so servers need no start-up hook.
    """

    def __init__(self, look: Callable[[], bool], *, period_s: float) -> None:
        self._look = look
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def ensure_running(self) -> None:
        """Arm the timer on the running loop, unless it is armed on a loop that is still open."""
        if self._timer is not None and self._loop is not None and not self._loop.is_closed():
            return
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._period_s, self._tick)

    def stop(self) -> None:
        """Stop looking."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _tick(self) -> None:
        self._timer = None
        if self._look():
            self.ensure_running()
