"""Leases: how long a session may be unused, and which have been for too long.

Attached and running sessions are spared. Knows limits and what sessions say of themselves; when to look, the
reaper knows.
"""

from __future__ import annotations

from collections.abc import Iterable

from .endings import EXPIRED
from .limits import SessionLimits
from .session import Session, SessionKind

_EXPIRING = frozenset({SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE})


def period_s(limits: SessionLimits) -> float:
    """Return how often to look: four times in the shortest life."""
    lives = [limits.idle_s, limits.soft_idle_s]
    return max(0.05, min([*lives, limits.grace_s] if limits.grace_s > 0 else lives) / 4)


def life_s(session: Session, limits: SessionLimits) -> float:
    """Return how long a session may be unused; one whose socket went has most likely lost its client."""
    if session.kind is SessionKind.RESUMABLE:
        return limits.grace_s
    is_soft = session.kind is SessionKind.SOFT or session.was_attached
    return limits.soft_idle_s if is_soft else limits.idle_s


def close_expired(sessions: Iterable[Session], limits: SessionLimits, now: float) -> bool:
    """Close sessions that nobody uses; say whether any are left to watch."""
    watched = [session for session in sessions if session.kind in _EXPIRING]
    for session in watched:
        unused_s = now - session.last_activity_at
        if session.is_idle and not session.is_attached and unused_s > life_s(session, limits):
            session.close(EXPIRED)
    return bool(watched)
