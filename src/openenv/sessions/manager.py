"""`SessionManager`: every live environment of a server, within its limit.

A slot is reserved before the factory runs and given back when the environment is closed, on every path. Soft sessions
(kept for clients that hold a cookie) make room for whoever needs their slot. Knows sessions and runners; must not know
HTTP, WebSocket or JSON.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..env.binding import factory_class, factory_name
from ..errors import (
    ConcurrencyConfigurationError,
    EnvironmentFactoryError,
    OpenEnvError,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    message_of,
)
from ..runners import Runner, current_hub, make_runner
from ..types import SessionInfo
from .events import Listener, SessionEvent
from .reaper import Reaper
from .session import Session, SessionKind, SessionState
from .waiting import Line, wait_until

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions, and how long each may be unused. Times are in seconds.

    Args:
        sessions: Environments held at once.
        idle_s: Life of an unused HTTP session.
        soft_idle_s: Life of an unused soft session.
        soft_sessions: Soft sessions kept at once.
        closing_wait_s: How long a newcomer waits for a slot whose session is already closing.
        drain_s: How long a shutdown waits for running calls.
    """

    sessions: int = 1
    idle_s: float = 900.0
    soft_idle_s: float = 60.0
    soft_sessions: int = 8
    closing_wait_s: float = 5.0
    drain_s: float = 10.0


class Reservation(NamedTuple):
    """What came of asking for a slot: a session, or whom to evict and what to wait for."""

    session: Session | None
    victim: Session | None = None
    wait_for: Literal["slot", "class"] | None = None


class SessionManager:
    """Opens, finds, counts and closes sessions.

    Args:
        factory: Makes an environment.
        limits: How many, and how long they live.
        runner: Where their code runs.
        clock: Tells the time.
        prepare: Called with each new environment, where its code runs.

    Raises:
        ConcurrencyConfigurationError: More than one session is asked for, and the class does not allow it.
    """

    def __init__(
        self,
        factory: Factory,
        limits: SessionLimits,
        *,
        runner: Runner | str = "auto",
        clock: Callable[[], float] = time.time,
        prepare: Callable[[Any], None] | None = None,
    ) -> None:
        self.factory = factory
        self._prepare = prepare
        self.limits = limits
        self.env_cls = factory_class(factory)
        self.listeners: list[Listener] = []
        self._clock = clock
        self._max_sessions = limits.sessions
        self._lock = threading.Lock()
        self._line = Line()  # for slots
        self._line_once = Line()  # for single requests, which are counted apart
        self._endings = Line()
        self._live: dict[str, Session] = {}
        self._once: set[Session] = set()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._draining = False
        self._reaper = Reaper(self._expired, period_s=self._reap_period())
        self._check(limits)
        self._runner_spec = runner
        self._runner = self._make_runner()

    def _check(self, limits: SessionLimits) -> None:
        if self.env_cls is not None and limits.sessions > 1 and not _is_concurrent(self.env_cls):
            raise ConcurrencyConfigurationError(self.env_cls.__name__, limits.sessions)

    def reconfigure(self, limits: SessionLimits, *, runner: str | None = None) -> None:
        """Change limits and runner; only before the first session.

        Raises:
            ConcurrencyConfigurationError: The class does not support so many sessions.
            RuntimeError: Sessions are open.
        """
        if self._live or self._once:
            raise RuntimeError("sessions are open; limits and runner can only be changed before the first one")
        self._check(limits)
        self.limits = limits
        self._max_sessions = limits.sessions
        self._reaper = Reaper(self._expired, period_s=self._reap_period())
        self._runner_spec = runner or self._runner_spec
        self._runner = self._make_runner()

    def _make_runner(self) -> Runner:
        if not isinstance(self._runner_spec, str):
            return self._runner_spec
        return make_runner(
            self._runner_spec,
            max_threads=min(1024, max(64, self.limits.sessions)),
            single_thread=bool(getattr(self.env_cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False)),
        )

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Slots in use."""
        return len(self._live)

    @property
    def max_sessions(self) -> int:
        """Slots there are; falls to one when the first environment turns out not to share a process."""
        return self._max_sessions

    @property
    def runner(self) -> Runner:
        """Where the environments' code runs."""
        return self._runner

    @property
    def is_draining(self) -> bool:
        """Whether the manager has stopped admitting."""
        return self._draining

    @property
    def is_concurrency_safe(self) -> bool:
        """Whether the environment says that its sessions share nothing; unknown counts as no."""
        return self.env_cls is not None and _is_concurrent(self.env_cls)

    def sessions(self) -> list[Session]:
        """List the sessions that hold a slot."""
        with self._lock:
            return list(self._live.values())

    def find(self, session_id: str) -> Session:
        """Return a live session that clients address by its id; a socket's own session is nobody else's.

        Raises:
            SessionLost: There was such a session; the reason says how it ended.
            SessionNotFoundError: There never was.
        """
        with self._lock:
            session = self._live.get(session_id)
            ended = self._ended.get(session_id)
        if session is not None and session.kind is SessionKind.SOCKET:
            raise SessionNotFoundError(session_id)
        if session is not None and session.state not in (SessionState.CLOSING, SessionState.CLOSED):
            return session
        if session is not None:
            raise SessionLost(session.close_reason or "closed")
        if ended is not None:
            raise SessionLost(ended)
        raise SessionNotFoundError(session_id)

    def info(self, session_id: str) -> SessionInfo | None:
        """Describe a session, or return None when there is none of that id."""
        with self._lock:
            session = self._live.get(session_id)
        if session is None:
            return None
        return SessionInfo(
            session_id=session.id,
            created_at=session.created_at,
            last_activity_at=session.last_activity_at,
            step_count=session.step_count,
            environment_type=type(session.env).__name__ if session.env is not None else factory_name(self.factory),
        )

    # -- opening ------------------------------------------------------------------------------------------------

    async def open(self, kind: SessionKind, *, on_reserved: Callable[[Session], None] | None = None) -> Session:
        """Reserve a slot, build the environment, return the session. A cancelled caller leaves nothing behind.

        Args:
            on_reserved: Called with the session before its environment is built, so that the caller can close it
                while it waits.

        Raises:
            SessionCapacityError: All slots are taken.
            EnvironmentFactoryError: The constructor raised.
            SessionClosedError: The session was closed while it was built.
        """
        session = await self._reserve(kind)
        if on_reserved is not None:
            on_reserved(session)
            if session.state is SessionState.CLOSED:
                raise SessionClosedError(session.id, session.close_reason or "closed")
        await self._construct(session)
        return session

    def reserve_at_once(self, kind: SessionKind) -> Session | None:
        """Reserve a slot for `build` to fill; None where `open` would have to wait for one, or to refuse."""
        session = self._try_reserve(kind).session
        if session is not None:
            self._admitted(session)
        return session

    @asynccontextmanager
    async def borrow(self) -> Any:
        """Build an environment for a single request, beside the slots; at most as many at once as there are slots.

        The session is closed afterwards, in the background, unless `keep_soft` gave it a slot meanwhile.
        """
        session = await self._reserve(SessionKind.ONCE)
        try:
            await self._construct(session)
            yield session
        finally:
            if session.kind is SessionKind.ONCE:
                session.close("request done")

    def keep_soft(self, session: Session) -> bool:
        """Give a borrowed session a slot of its own, if one is free, so that a cookie can continue it."""
        with self._lock:
            soft = self._evictable()
            full = len(self._live) >= self._max_sessions
            oldest = min(soft, key=lambda other: other.last_activity_at, default=None)
            crowded = len(soft) >= self.limits.soft_sessions or full
            if self._draining or (crowded and oldest is None):
                return False
            if session.state not in (SessionState.READY, SessionState.BUSY):
                return False
            if crowded and oldest is not None:
                if not oldest.is_idle:
                    return False
                self._forget(oldest, "evicted")
            self._once.discard(session)
            session.kind = SessionKind.SOFT
            self._live[session.id] = session
        if crowded and oldest is not None:
            oldest.close("evicted")
        self._line_once.notify_one()
        self._reaper.ensure_running()
        return True

    def promote(self, session: Session) -> None:
        """Give a soft session the life of an explicit one: its client has shown that it comes back."""
        with self._lock:
            if session.kind is SessionKind.SOFT and self._live.get(session.id) is session:
                session.kind = SessionKind.HTTP

    async def _reserve(self, kind: SessionKind) -> Session:
        session = self._try_reserve(kind).session or await self._reserve_patiently(kind)
        self._admitted(session)
        return session

    def _admitted(self, session: Session) -> None:
        self._emit("opened", session)
        if session.kind is not SessionKind.ONCE:
            self._reaper.ensure_running()

    async def _reserve_patiently(self, kind: SessionKind) -> Session:
        """Wait while a slot is about to come free; single requests wait their turn, sessions not for long."""
        deadline = None
        if kind is not SessionKind.ONCE:
            deadline = asyncio.get_running_loop().time() + self.limits.closing_wait_s
        line = self._line_once if kind is SessionKind.ONCE else self._line
        while True:
            turn = line.subscribe()
            was_called = False
            try:
                session, victim, wait_for = self._try_reserve(kind)
                if session is not None:
                    return session
                if victim is not None:
                    victim.close("evicted")
                if wait_for is None:
                    raise self._refusal()
                # A constructor takes the time it takes; a session that is closing is not waited for as long.
                was_called = await wait_until(turn, None if wait_for == "class" else deadline)
                if not was_called and not self._drop_stuck_soft():
                    raise self._refusal()
            finally:
                if not line.unsubscribe(turn) and not was_called:
                    line.notify_one()  # called, but no longer waiting: the turn goes to the next

    def _refusal(self) -> SessionCapacityError:
        text = "The server is shutting down and opens no more sessions." if self._draining else None
        return SessionCapacityError(self.active, self._max_sessions, text)

    def _try_reserve(self, kind: SessionKind) -> Reservation:
        """Reserve if possible; else name a session to evict, and what to wait for."""
        with self._lock:
            if self._draining:
                return Reservation(None)
            if self.env_cls is None and any(
                s.state is SessionState.CREATING for s in (*self._live.values(), *self._once)
            ):
                return Reservation(None, wait_for="class")  # the first will tell which it is, and what that allows
            held = self._once if kind is SessionKind.ONCE else self._live
            if len(held) < self._max_sessions:
                return Reservation(self._insert(kind))
            if kind is SessionKind.ONCE:
                return Reservation(None, wait_for="slot")
            victim = min(self._evictable(), key=lambda s: (not s.is_idle, s.last_activity_at), default=None)
            closing = victim is not None or any(s.state is SessionState.CLOSING for s in self._live.values())
            return Reservation(None, victim, "slot" if closing else None)

    def _evictable(self) -> list[Session]:
        """Soft sessions that nobody is connected to; the caller holds the lock."""
        return [
            session
            for session in self._live.values()
            if session.kind is SessionKind.SOFT
            and not session.is_attached
            and session.state is not SessionState.CLOSING
        ]

    def _insert(self, kind: SessionKind) -> Session:
        session = Session(
            str(uuid.uuid4()),
            kind,
            lane=self._runner.lane(),
            clock=self._clock,
            on_ready=self._on_ready,
            on_closed=self._on_closed,
        )
        if kind is SessionKind.ONCE:
            self._once.add(session)
        else:
            self._live[session.id] = session
        return session

    def _drop_stuck_soft(self) -> bool:
        """Stop counting a soft session that does not come to its end: it must not be in another client's way."""
        with self._lock:
            for session in self._live.values():
                if session.kind is SessionKind.SOFT and session.state is SessionState.CLOSING:
                    self._forget(session, "evicted")
                    return True
        return False

    async def _construct(self, session: Session) -> None:
        future: asyncio.Future[OpenEnvError | None] = asyncio.get_running_loop().create_future()

        def told(problem: OpenEnvError | None) -> None:
            if not future.done():
                future.set_result(problem)

        self.build(session, told)
        try:
            problem = await future
        except BaseException:
            session.close("cancelled while it was created")
            raise
        if problem is not None:
            raise problem

    def build(self, session: Session, done: Callable[[OpenEnvError | None], None]) -> None:
        """Build the environment of a reserved session; `done` is told of a problem or None, on the running loop."""

        def built(_: Any, error: BaseException | None) -> None:
            done(self._problem(session, error))

        session.construct(self._build, built, current_hub())

    def _build(self) -> Any:
        env = self.factory()
        if self._prepare is not None:
            self._prepare(env)
        return env

    def _problem(self, session: Session, error: BaseException | None) -> OpenEnvError | None:
        """What whoever opened a session has to know once its constructor has run."""
        if error is not None:
            name = factory_name(self.factory)
            logger.error("session %s: the environment factory %s failed", session.id, name, exc_info=error)
            problem = EnvironmentFactoryError(name, reason=f"{type(error).__name__}: {message_of(error)}")
            problem.__cause__ = error
            return problem
        if session.state in (SessionState.CLOSING, SessionState.CLOSED):
            return SessionClosedError(session.id, session.close_reason or "closed")
        return None

    # -- what sessions report, from any thread ------------------------------------------------------------------

    def _on_ready(self, session: Session, error: BaseException | None) -> None:
        if error is not None:
            self._emit("failed", session, message_of(error))
            return
        if self.env_cls is None:
            self._learn_class(session)
        self._emit("ready", session)

    def _learn_class(self, session: Session) -> None:
        with self._lock:
            self.env_cls = cls = type(session.env)
            if self._max_sessions > 1 and not _is_concurrent(cls):
                logger.error("%s", ConcurrencyConfigurationError(cls.__name__, self._max_sessions))
                self._max_sessions = 1
        if getattr(cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
            self._runner.pin(session.lane)
        self._line.notify_all()
        self._line_once.notify_all()

    def _on_closed(self, session: Session) -> None:
        with self._lock:
            self._once.discard(session)
            if self._live.get(session.id) is session:
                self._forget(session, session.close_reason or "closed")
        (self._line_once if session.kind is SessionKind.ONCE else self._line).notify_one()
        self._endings.notify_all()
        self._emit("closed", session, session.close_reason)

    def _forget(self, session: Session, reason: str) -> None:
        """Give the slot back; the caller holds the lock."""
        self._live.pop(session.id, None)
        if session.kind in (SessionKind.HTTP, SessionKind.SOFT):
            self._ended[session.id] = reason
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def _emit(self, name: Any, session: Session, reason: str | None = None) -> None:
        for listener in self.listeners:
            try:
                listener(SessionEvent(name, session.id, reason))
            except Exception:
                logger.exception("a session listener failed")

    # -- ending -------------------------------------------------------------------------------------------------

    def _reap_period(self) -> float:
        return max(0.05, min(self.limits.idle_s, self.limits.soft_idle_s) / 4)

    def _expired(self) -> bool:
        """Close sessions that nobody uses; say whether any are left to watch. Attached and running ones are spared."""
        now = self._clock()
        watched = [session for session in self.sessions() if session.kind in (SessionKind.HTTP, SessionKind.SOFT)]
        for session in watched:
            unused_s = now - session.last_activity_at
            if session.is_idle and not session.is_attached and unused_s > self._idle_limit(session):
                session.close("expired")
        return bool(watched)

    def _idle_limit(self, session: Session) -> float:
        """How long a session may be unused; one whose socket went has most likely lost its client."""
        return (
            self.limits.soft_idle_s if session.kind is SessionKind.SOFT or session.was_attached else self.limits.idle_s
        )

    async def drain(self) -> None:
        """Stop admitting, let running calls finish within the limit, close every environment, stop the threads."""
        self._draining = True
        self._reaper.stop()
        self._line.notify_all()
        self._line_once.notify_all()
        deadline = asyncio.get_running_loop().time() + self.limits.drain_s
        with self._lock:
            sessions = [*self._live.values(), *self._once]
        for session in sessions:
            session.close("server shutting down")
        while True:
            ending = self._endings.subscribe()
            with self._lock:
                left = [*self._live.values(), *self._once]
            if not left or not await wait_until(ending, deadline):
                self._endings.unsubscribe(ending)
                break
        if left:
            logger.warning("%d session(s) did not end within %.0f s of shutdown", len(left), self.limits.drain_s)
        await asyncio.get_running_loop().run_in_executor(None, self._runner.close, 1.0 if left else 5.0)

    def resume(self) -> None:
        """Admit again after a drain, for an application that is started a second time."""
        if self._draining:
            self._runner = self._make_runner()
            self._draining = False


def _is_concurrent(env_cls: type[Any]) -> bool:
    return bool(getattr(env_cls, "SUPPORTS_CONCURRENT_SESSIONS", False))
