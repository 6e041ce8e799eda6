"""The lifetime of sessions: limits, leases, the reaper, the watch over hanging ends, and close reasons.

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

# Logs and metrics distinguish these from the reasons above; clients see the same reason.
CLOSED_BY_CLIENT: Final = "closed by the client"
DISCONNECTED: Final = "client disconnected"
CANCELLED: Final = "cancelled while it was created"
_CLIENT_REASON_OF: Mapping[str, str] = {CLOSED_BY_CLIENT: CLOSED, DISCONNECTED: EXPIRED, CANCELLED: CLOSED}

# Why a connection has lost a session that continues.
TAKEN_OVER: Final = "another connection has attached to it"

UNCLAIMED_S: Final = 60.0
"""The shortest time that a copied session waits for a client to attach with its token."""
_HANGING_S: Final = 1.0  # a `close` that takes longer must not block other sessions of its thread
_FEWEST_LEFT: Final = 16
_MOST_LEFT: Final = 4096
_YOUNG, _OLD = 1, 2  # generations of garbage collection
_LEASED: Final = frozenset({SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE})


def client_reason(reason: str | None) -> str:
    """Return a session's close reason for clients; None means that it was closed without a reason."""
    return CLOSED if reason is None else _CLIENT_REASON_OF.get(reason, reason)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions a server holds, and how long each may be unused. Times are in seconds.

    Args:
        sessions: Environments held at once.
        idle_s: The lease of an HTTP session.
        soft_idle_s: The lease of a soft session, and of an HTTP session after its client has left.
        soft_sessions: Soft sessions kept at once.
        grace_s: The lease of a detached session.
        queue: How many clients may wait for a slot.
        agents: Sessions opened by agents, held at once; None for all but one, or the only one.
        closing_wait_s: How long a client waits for the slot of a closing session.
        close_s: How long an environment's `close` may take before its slot is freed.
        drain_s: How long a shutdown waits for running calls.
        finish_s: How long sessions may continue after SIGTERM, before the shutdown begins.
        separate: Whether to allow several sessions of a class that does not declare whether its instances share state.
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
        """How often to check for expired leases: a quarter of the shortest lease."""
        leases = [self.idle_s, self.soft_idle_s]
        return max(0.05, min([*leases, self.grace_s] if self.grace_s > 0 else leases) / 4)


def life_s(session: Session, limits: SessionLimits) -> float:
    """Return the lease of a session: how long it may be unused."""
    if session.kind is SessionKind.RESUMABLE:
        return max(limits.grace_s, UNCLAIMED_S) if session.is_unclaimed else limits.grace_s
    is_soft = session.kind is SessionKind.SOFT or session.client_left
    return limits.soft_idle_s if is_soft else limits.idle_s


def close_expired(sessions: Iterable[Session], limits: SessionLimits, now: float) -> bool:
    """Close sessions with an expired lease; return whether any sessions remain to watch.

    An attached session, or one that runs a call, never expires.
    """
    leased = [session for session in sessions if session.kind in _LEASED]
    for session in leased:
        unused_s = now - session.last_activity_at
        if session.is_idle and not session.is_attached and unused_s > life_s(session, limits):
            session.close(EXPIRED)
    return bool(leased)


class Reaper:
    """Calls `look` periodically until it returns False.

    It starts with the first session to watch, on that session's loop, so servers need no start-up hook.
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
    """Watches closing sessions until they are closed, or until they hang too long and are abandoned.

        closing ── `close` began ── 1 s ──> sessions on the same thread get another one
              │                 └── `close_s` ──> abandoned
              └── a call still runs ── `idle_s` ──> abandoned; until then it may be a long step of a lost client

    One timer, on the loop of the sessions, runs while any session is closing.

    Args:
        limits: Returns the limits.
        clock: The clock of the sessions.
        abandon: Abandons a session; returns False if it has to keep its slot.
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
        """Watch a closing session; from any thread."""
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
        except RuntimeError:  # the loop has ended: `drain` closes the remaining sessions
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
    """Collects garbage before many closed environments fill the memory.

    A FastMCP server refers to its environment through the tools, and the environment to its server. Only the garbage
    collector frees this cycle. It counts objects and not bytes, so the state of hundreds of environments could
    accumulate before it runs.

    An environment of a single request is young garbage, and looking at young objects only costs a tenth.

    Args:
        live: Returns the number of environments in use; collecting takes longer with more of them.
        collect: Collects garbage up to a generation.
    """

    def __init__(self, live: Callable[[], int], collect: Callable[[int], object] = gc.collect) -> None:
        self._live = live
        self._collect = collect
        self._lock = threading.Lock()
        self._left: dict[int, weakref.ref[Any]] = {}
        self._fewest = _FEWEST_LEFT

    def add(self, env: Any) -> None:
        """Count a closed environment until it is freed; from any thread."""
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
        self._collect(_YOUNG)
        if sum(ref() is not None for ref in left.values()) > len(left) // 2:
            self._collect(_OLD)
        # If something else keeps them alive, collecting again soon would only cost time.
        is_of_use = any(ref() is None for ref in left.values())
        self._fewest = _FEWEST_LEFT if is_of_use else min(2 * self._fewest, _MOST_LEFT)

    def _freed(self, ref: weakref.ref[Any]) -> None:
        self._left.pop(id(ref), None)  # without the lock, which this very thread may hold
