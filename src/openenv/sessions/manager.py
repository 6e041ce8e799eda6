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
from .admission import AdmissionQueue
from .attachment import Attachments, ending
from .events import Listener, SessionEvent
from .limits import SessionLimits
from .reaper import Reaper
from .session import Call, CallFactory, Session, SessionKind, SessionState
from .waiting import Line, wait_until

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]
_REMEMBERED = 10_000
_EXPIRING = frozenset({SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE})


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
        explain: Says to whoever opens a session why its environment could not be built.

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
        explain: Callable[[BaseException], str] = lambda error: f"{type(error).__name__}: {message_of(error)}",
    ) -> None:
        self.factory = factory
        self._prepare = prepare
        self._explain = explain
        self.limits = limits
        self.env_cls = factory_class(factory)
        self.listeners: list[Listener] = []
        self.wants_origins = False
        self._make_call: CallFactory = Call
        self._clock = clock
        self._max_sessions = limits.sessions
        self._lock = threading.Lock()
        self._line = Line()  # for slots
        self._line_once = Line()  # for single requests, which are counted apart
        self._endings = Line()
        self._live: dict[str, Session] = {}
        self._once: set[Session] = set()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.attachments = Attachments(self._lookup, lambda: self.limits.grace_s)
        self.queue = AdmissionQueue(limits.queue)
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
        self.queue.limit = limits.queue
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
    def is_quiet(self) -> bool:
        """Whether no session has anything to do."""
        with self._lock:
            return all(session.is_idle for session in (*self._live.values(), *self._once))

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
        try:
            return self._find(session_id)
        except OpenEnvError as exc:
            self.report_error(exc.code)
            raise

    def _find(self, session_id: str) -> Session:
        with self._lock:
            session = self._live.get(session_id)
            ended = self._ended.get(session_id)
        if session is not None and session.kind in (SessionKind.SOCKET, SessionKind.RESUMABLE):
            raise SessionNotFoundError(session_id)
        if session is not None and session.state not in (SessionState.CLOSING, SessionState.CLOSED):
            return session
        if session is not None:
            raise SessionLost(session.close_reason or "closed")
        if ended is not None:
            raise SessionLost(ended)
        raise SessionNotFoundError(session_id)

    def _lookup(self, session_id: str) -> tuple[Session | None, str | None]:
        """Return a live session, and how one that is gone has ended."""
        with self._lock:
            return self._live.get(session_id), self._ended.get(session_id)

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

    def reserve_at_once(self, kind: SessionKind, *, key: str | None = None) -> Session | None:
        """Reserve a slot for `build` to fill; None where `open` would have to wait for one, or to refuse."""
        session = self._try_reserve(kind, key=key).session
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

    async def open_in_turn(
        self,
        kind: SessionKind,
        *,
        wait_s: float = 0.0,
        key: str | None = None,
        on_position: Callable[[int], None] | None = None,
    ) -> Session:
        """Open a session, after those who came before if there is no slot at once.

        Args:
            kind: Who keeps it alive.
            wait_s: How long to wait for a slot.
            key: Whom it counts for, where there is a limit for each.
            on_position: Told the place in line, now and then.

        Raises:
            SessionCapacityError: No slot came free in time, or too many wait.
            EnvironmentFactoryError: The constructor raised.
            SessionClosedError: The session was closed while it was built.
        """
        session = self.reserve_at_once(kind, key=key) or await self._wait_in_line(kind, wait_s, key, on_position)
        await self._construct(session)
        return session

    async def _wait_in_line(
        self, kind: SessionKind, wait_s: float, key: str | None, on_position: Callable[[int], None] | None
    ) -> Session:
        ticket = self.queue.join() if wait_s > 0 and not self._is_over(key) else None
        if ticket is None:
            if wait_s <= 0 and not self._is_over(key) and not self.queue:
                return await self._reserve(kind, key=key)  # a slot that is just coming free is worth a moment
            raise self._refusal()
        deadline = asyncio.get_running_loop().time() + wait_s
        try:
            while True:
                if ticket.called.done():
                    self.queue.wait_again(ticket)
                reserved = self._try_reserve(kind, key=key, is_next=self.queue.is_next(ticket))
                if reserved.session is not None:
                    self._admitted(reserved.session)
                    return reserved.session
                if reserved.victim is not None:
                    reserved.victim.close("evicted")
                if self._is_over(key):
                    self.queue.stand_aside(ticket)
                if on_position is not None:
                    on_position(self.queue.position(ticket))
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or self._draining:
                    raise self._refusal()
                await asyncio.wait([ticket.called], timeout=min(left, 1.0))
        finally:
            self.queue.leave(ticket)

    def _is_over(self, key: str | None) -> bool:
        limit = self.limits.per_key
        if key is None or limit is None:
            return False
        with self._lock:
            return sum(session.key == key for session in self._live.values()) >= limit

    async def _reserve(self, kind: SessionKind, *, key: str | None = None) -> Session:
        session = self._try_reserve(kind, key=key).session or await self._reserve_patiently(kind, key)
        self._admitted(session)
        return session

    def _admitted(self, session: Session) -> None:
        self._emit("opened", session)
        if session.kind is not SessionKind.ONCE:
            self._reaper.ensure_running()

    async def _reserve_patiently(self, kind: SessionKind, key: str | None) -> Session:
        """Wait while a slot is about to come free; single requests wait their turn, sessions not for long."""
        deadline = None
        if kind is not SessionKind.ONCE:
            deadline = asyncio.get_running_loop().time() + self.limits.closing_wait_s
        line = self._line_once if kind is SessionKind.ONCE else self._line
        while True:
            turn = line.subscribe()
            was_called = False
            try:
                session, victim, wait_for = self._try_reserve(kind, key=key)
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

    @property
    def retry_after_s(self) -> float:
        """When to ask again; longer for a longer line: whoever comes back too soon finds it as it was."""
        return 1.0 + len(self.queue) // 100

    def _refusal(self) -> SessionCapacityError:
        text = "The server is shutting down and opens no more sessions." if self._draining else None
        self.report_error(SessionCapacityError.code)
        return SessionCapacityError(self.active, self._max_sessions, text)

    def _try_reserve(self, kind: SessionKind, *, key: str | None = None, is_next: bool = False) -> Reservation:
        """Reserve if possible; else name a session to evict, and what to wait for. Those in line come first."""
        if self._is_over(key):
            return Reservation(None)
        with self._lock:
            if self._draining or (self.queue and not is_next and kind is not SessionKind.ONCE):
                return Reservation(None)
            if self.env_cls is None and any(
                s.state is SessionState.CREATING for s in (*self._live.values(), *self._once)
            ):
                return Reservation(None, wait_for="class")  # the first will tell which it is, and what that allows
            held = self._once if kind is SessionKind.ONCE else self._live
            if len(held) < self._max_sessions:
                return Reservation(self._insert(kind, key))
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

    def _insert(self, kind: SessionKind, key: str | None) -> Session:
        session = Session(
            str(uuid.uuid4()),
            kind,
            lane=self._runner.lane(),
            clock=self._clock,
            on_ready=self._on_ready,
            on_closed=self._on_closed,
            on_error=self._on_error,
        )
        session.make_call = self._make_call
        session.key = key
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
            problem = EnvironmentFactoryError(name, reason=self._explain(error))
            self.report_error(problem.code, session)
            problem.__cause__ = error
            return problem
        if session.state in (SessionState.CLOSING, SessionState.CLOSED):
            return SessionClosedError(session.id, session.close_reason or "closed")
        return None

    def make_calls_with(self, factory: CallFactory, *, with_origins: bool = False) -> None:
        """Have every session make its calls in another way from now on, for whoever wants to watch them.

        Args:
            factory: Makes a call.
            with_origins: Whether surfaces are to tell where requests come from, which is not free.
        """
        self.wants_origins = self.wants_origins or with_origins
        with self._lock:
            self._make_call = factory
            for session in (*self._live.values(), *self._once):
                session.make_call = factory

    # -- what sessions report, from any thread ------------------------------------------------------------------

    def _on_ready(self, session: Session, error: BaseException | None) -> None:
        if error is not None:
            self._emit("failed", session, message_of(error))
            return
        if self.env_cls is None:
            self._learn_class(session)
        self._emit("ready", session)

    def _on_error(self, session: Session, error: BaseException) -> None:
        self.report_error(error.code if isinstance(error, OpenEnvError) else "EXECUTION_ERROR", session)

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
        holder, session.holder = session.holder, None
        if holder is not None:
            holder.let_go(session, ending(session.close_reason or "closed"))
        (self._line_once if session.kind is SessionKind.ONCE else self._line).notify_one()
        self.queue.slot_freed()
        self._endings.notify_all()
        self._tell(SessionEvent("closed", session.id, session.close_reason, session.step_count, session.ledger.hits))

    def _forget(self, session: Session, reason: str) -> None:
        """Give the slot back; the caller holds the lock."""
        self._live.pop(session.id, None)
        if session.kind in (SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE):
            self._ended[session.id] = reason
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def _emit(self, name: Any, session: Session, reason: str | None = None) -> None:
        self._tell(SessionEvent(name, session.id, reason))

    def report_error(self, code: str, session: Session | None = None) -> None:
        """Tell those who listen that a request was answered with an error."""
        self._tell(SessionEvent("error", session.id if session is not None else "", code))

    def _tell(self, event: SessionEvent) -> None:
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a session listener failed")

    # -- ending -------------------------------------------------------------------------------------------------

    def _reap_period(self) -> float:
        lives = [self.limits.idle_s, self.limits.soft_idle_s]
        return max(0.05, min([*lives, self.limits.grace_s] if self.limits.grace_s > 0 else lives) / 4)

    def _expired(self) -> bool:
        """Close sessions that nobody uses; say whether any are left to watch. Attached and running ones are spared."""
        now = self._clock()
        watched = [session for session in self.sessions() if session.kind in _EXPIRING]
        for session in watched:
            unused_s = now - session.last_activity_at
            if session.is_idle and not session.is_attached and unused_s > self._idle_limit(session):
                session.close("expired")
        return bool(watched)

    def _idle_limit(self, session: Session) -> float:
        """How long a session may be unused; one whose socket went has most likely lost its client."""
        if session.kind is SessionKind.RESUMABLE:
            return self.limits.grace_s
        is_soft = session.kind is SessionKind.SOFT or session.was_attached
        return self.limits.soft_idle_s if is_soft else self.limits.idle_s

    def stop_admitting(self) -> None:
        """Open no more sessions, and refuse those who wait for one; what runs goes on."""
        self._draining = True
        self._line.notify_all()
        self._line_once.notify_all()

    async def drain(self) -> None:
        """Stop admitting, let running calls finish within the limit, close every environment, stop the threads."""
        self.stop_admitting()
        self._reaper.stop()
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
