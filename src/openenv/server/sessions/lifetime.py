"""How long sessions live and why they end: limits, leases, the reaper, ends that hang, and the reasons for clients.

The reasons are part of the protocol (docs/protocol.md: `SESSION_LOST` and `detached`).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..runners.base import WORKER_CRASHED as WORKER_CRASHED
from .session import Session, SessionKind, SessionState

CLOSED: Final = "closed"
EXPIRED: Final = "expired"
EVICTED: Final = "evicted"
SHUTTING_DOWN: Final = "server shutting down"
RESTARTED: Final = "server restarted"
UNKNOWN: Final = "unknown"
UNANSWERED: Final = "the first reset was not answered"
NOT_BEGUN: Final = "its first episode could not begin"
RESTORE_FAILED: Final = "its environment could not be restored"

# Logs and metrics distinguish these from the above; clients need not.
CLOSED_BY_CLIENT: Final = "closed by the client"
DISCONNECTED: Final = "client disconnected"
CANCELLED: Final = "cancelled while it was created"
_CLIENT_REASON_OF: Mapping[str, str] = {CLOSED_BY_CLIENT: CLOSED, DISCONNECTED: EXPIRED, CANCELLED: CLOSED}

# Why a connection no longer holds a session that goes on.
TAKEN_OVER: Final = "another connection has attached to it"

UNCLAIMED_S: Final = 60.0
"""How long a copy of a session is kept, at least, for the client that has its token and has not attached to it yet."""
_HANGING_S: Final = 1.0  # a `close` that takes longer must not keep other sessions from their thread
_FEWEST_LEFT: Final = 16
_MOST_LEFT: Final = 4096
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
        agents: Sessions held at once that agents have opened; None for all but one, or the only one.
        closing_wait_s: How long a client waits for a slot whose session is already closing.
        close_s: How long an environment's `close` may take before its slot is given to others.
        drain_s: How long a shutdown waits for running calls.
        finish_s: How long sessions may go on after SIGTERM, before the shutdown begins.
        separate: Whether a class that does not say if its instances share something may have several sessions.
    """

    sessions: int = 1
    idle_s: float = 900.0
    soft_idle_s: float = 60.0
    soft_sessions: int = 8
    grace_s: float = 60.0
    queue: int = 10_000
    agents: int | None = None
    closing_wait_s: float = 5.0
    close_s: float = 30.0
    drain_s: float = 10.0
    finish_s: float = 0.0
    separate: bool = False

    @property
    def reaper_period_s(self) -> float:
        """How often to look for expired leases: four times in the shortest one."""
        leases = [self.idle_s, self.soft_idle_s]
        return max(0.05, min([*leases, self.grace_s] if self.grace_s > 0 else leases) / 4)


def life_s(session: Session, limits: SessionLimits) -> float:
    """Return the lease of a session: how long it may be unused."""
    if session.kind is SessionKind.RESUMABLE:
        return max(limits.grace_s, UNCLAIMED_S) if session.is_unclaimed else limits.grace_s
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


class CloseWatch:
    """Watches sessions that are closing until they are closed, or hang for so long that they are given up.

        closing ── `close` began ── 1 s ──> sessions on the same thread get another one
              │                 └── `close_s` ──> abandoned
              └── a call still runs ── `idle_s` ──> abandoned: it may be a long step, whose client is gone

    One timer, on the loop that opened the sessions, runs while there are any.

    Args:
        limits: Returns the limits.
        clock: That of the sessions.
        abandon: Gives a session up; returns False where it has to stay.
    """

    def __init__(
        self,
        limits: Callable[[], SessionLimits],
        clock: Callable[[], float],
        abandon: Callable[[Session, float], bool],
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._abandon = abandon
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._is_armed = False

    def add(self, session: Session) -> None:
        """Watch a session that begins to end; from any thread."""
        loop = session.loop
        if loop is None:
            return
        with self._lock:
            self._sessions[session.id] = session
            if self._is_armed:
                return
            self._is_armed = True
        try:
            loop.call_soon_threadsafe(self._arm, loop)
        except RuntimeError:  # the loop has ended: `drain` looks after what is left
            self._is_armed = False

    def discard(self, session: Session) -> None:
        """Stop watching a session that has ended; from any thread."""
        with self._lock:
            self._sessions.pop(session.id, None)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(max(0.02, min(_HANGING_S, self._limits().close_s) / 4), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        limits, now = self._limits(), self._clock()
        for session in list(self._sessions.values()):
            if session.state is not SessionState.CLOSING:
                self.discard(session)
                continue
            began_at = session.close_began_at
            since = session.closing_at if began_at is None else began_at
            passed_s = now - (now if since is None else since)
            if passed_s > (limits.idle_s if began_at is None else limits.close_s):
                if self._abandon(session, passed_s):
                    self.discard(session)
            elif began_at is not None and passed_s > _HANGING_S:
                session.make_way()
        with self._lock:
            self._is_armed = bool(self._sessions)
        if self._is_armed:
            self._arm(loop)


class ClosedEnvironments:
    """Collects garbage before environments that are closed, but still in memory, become many.

    A FastMCP server refers to its environment by the tools, and the environment to its server. Only the garbage
    collector frees such a circle, and it counts objects, not bytes: the state of hundreds of environments may be
    left when it looks.

    Args:
        live: Returns how many environments are in use: looking takes longer, the more there are.
        collect: Collects garbage.
    """

    def __init__(self, live: Callable[[], int], collect: Callable[[], object] = gc.collect) -> None:
        self._live = live
        self._collect = collect
        self._lock = threading.Lock()
        self._left: dict[int, weakref.ref[Any]] = {}
        self._fewest = _FEWEST_LEFT

    def add(self, env: Any) -> None:
        """Count an environment that is closed until it is freed; from any thread."""
        try:
            ref = weakref.ref(env, self._freed)
        except TypeError:  # its class takes no weak references
            return
        with self._lock:
            self._left[id(ref)] = ref
            if len(self._left) < max(self._fewest, self._live() // 4):
                return
            left, self._left = self._left, {}
        del env, ref
        self._collect()
        # Where something else keeps them, looking again soon would only cost time.
        is_of_use = any(ref() is None for ref in left.values())
        self._fewest = _FEWEST_LEFT if is_of_use else min(2 * self._fewest, _MOST_LEFT)

    def _freed(self, ref: weakref.ref[Any]) -> None:
        self._left.pop(id(ref), None)  # without the lock, which this very thread may hold
