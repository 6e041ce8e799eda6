"""What a server allows its sessions: how many, for whom, and how long each may be unused. Knows numbers only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..runners.base import WORKER_CRASHED as WORKER_CRASHED
from .session import Session, SessionKind


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions, and how long each may be unused. Times are in seconds.

    Args:
        sessions: Environments held at once.
        idle_s: Life of an unused HTTP session.
        soft_idle_s: Life of an unused soft session.
        soft_sessions: Soft sessions kept at once.
        grace_s: Life of a resumable session that nobody is attached to.
        queue: How many may wait for a slot.
        per_key: Sessions held at once for one key of the clients' choosing; None for no such limit.
        agents: Sessions held at once that agents have opened; None for no such limit.
        closing_wait_s: How long a newcomer waits for a slot whose session is already closing.
        drain_s: How long a shutdown waits for running calls.
    """

    sessions: int = 1
    idle_s: float = 900.0
    soft_idle_s: float = 60.0
    soft_sessions: int = 8
    grace_s: float = 60.0
    queue: int = 10_000
    per_key: int | None = None
    agents: int | None = None
    closing_wait_s: float = 5.0
    drain_s: float = 10.0


# endings: How sessions end, and what clients are told of it: the reasons of `SESSION_LOST` and of `detached`.
#
# Knows words only; the words are part of the protocol.


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

CLIENT_REASONS: Final = (
    CLOSED,
    EXPIRED,
    EVICTED,
    SHUTTING_DOWN,
    RESTARTED,
    UNKNOWN,
    UNANSWERED,
    NOT_BEGUN,
    WORKER_CRASHED,
)
"""All reasons that clients of this server can be told, but for those of an operator's own."""

_TOLD_AS: Mapping[str, str] = {CLOSED_BY_CLIENT: CLOSED, DISCONNECTED: EXPIRED, CANCELLED: CLOSED}


def client_reason(reason: str | None) -> str:
    """Name the reason of an end as clients know it; None is a session that was closed without one."""
    return CLOSED if reason is None else _TOLD_AS.get(reason, reason)


# leases: Leases: how long a session may be unused, and which have been for too long.
#
# Attached and running sessions are spared. Knows limits and what sessions say of themselves; when to look, the
# reaper knows.


_EXPIRING = frozenset({SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE})


def period_s(limits: SessionLimits) -> float:
    """Return how often to look: four times in the shortest life."""
    lives = [limits.idle_s, limits.soft_idle_s]
    return max(0.05, min([*lives, limits.grace_s] if limits.grace_s > 0 else lives) / 4)


def life_s(session: Session, limits: SessionLimits) -> float:
    """Return how long a session may be unused; one whose socket went has most likely lost its client."""
    if session.kind is SessionKind.RESUMABLE:
        return limits.grace_s
    is_soft = session.kind is SessionKind.SOFT or session.client_left
    return limits.soft_idle_s if is_soft else limits.idle_s


def close_expired(sessions: Iterable[Session], limits: SessionLimits, now: float) -> bool:
    """Close sessions that nobody uses; say whether any are left to watch."""
    watched = [session for session in sessions if session.kind in _EXPIRING]
    for session in watched:
        unused_s = now - session.last_activity_at
        if session.is_idle and not session.is_attached and unused_s > life_s(session, limits):
            session.close(EXPIRED)
    return bool(watched)


# The reaper: looks at unused sessions now and then, as long as there are any.
#
# It starts with the first session it has to watch, on whatever loop that session was opened, without a start-up hook.
# Knows when to look; what counts as unused is in `leases`.


class Reaper:
    """Calls `look` periodically until it returns False."""

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
        """Look no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _tick(self) -> None:
        self._timer = None
        if self._look():
            self.ensure_running()
