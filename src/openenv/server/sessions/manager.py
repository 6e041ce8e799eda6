"""`SessionManager`: all live environments of a server, within its limits.

A slot is reserved before the factory runs and returned when the environment is closed, on every path. `slots` assigns
them to clients. Knows sessions and runners; must not know HTTP, WebSocket or JSON.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from openenv.env.binding import RemoteEnvironment, class_of, declared_concurrency, factory_class, factory_name
from openenv.env.copies import EnvironmentCopy, copies_of
from openenv.errors import (
    ConcurrencyConfigurationError,
    EnvironmentFactoryError,
    NonFiniteReward,
    NotForkable,
    OpenEnvError,
    RequestValidationError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    message_of,
)
from openenv.types import SessionInfo

from ..author_frames import author_exc_info
from ..runners import Lane, ProcessOptions, Runner, current_dispatcher, make_runner
from .events import SessionEvent, SessionListener
from .group import StepObservers
from .lifetime import (
    CANCELLED,
    RESTORE_FAILED,
    SHUTTING_DOWN,
    ClosedEnvironments,
    CloseWatch,
    Reaper,
    SessionLimits,
    client_reason,
    close_expired,
)
from .operations import FORK, RESTORE
from .peers import Answers, Peers, not_found
from .resume import Attachments, Openings
from .session import (
    REQUEST_DONE,
    CallFactory,
    ObserveStep,
    Session,
    SessionCall,
    SessionCallbacks,
    SessionKind,
    SessionState,
)
from .slots import CapacityQueue, OnPosition, Slots

logger = logging.getLogger(__name__)

HURRIED_S: Final = 2.0
"""The longest drain after a second signal."""
_LOOK_S: Final = 0.25  # how often a drain checks whether to hurry
EXIT_S: Final = 5.0
"""How long the end of a process waits for environments that no drain has closed."""

Factory = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class SessionClocks:
    """Where sessions get the time from.

    Args:
        steady: For leases. It never jumps: setting the system clock must not end every session.
        wall: For the times that clients see.
    """

    steady: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


def _nothing(env: Any) -> None:
    return


def _full_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


@dataclass(frozen=True, slots=True)
class FactoryHooks:
    """A server's hooks for building environments.

    Args:
        prepare: Called with each new environment, in its lane.
        explain: Describes a failed constructor to the client that opens the session.
    """

    prepare: Callable[[Any], None] = _nothing
    explain: Callable[[BaseException], str] = _full_text


class SessionManager:
    """Opens, finds, counts and closes sessions.

    Args:
        factory: Makes an environment.
        limits: The number and lifetime of sessions.
        runner: Runs their code.
        processes: Options of the `process` runner.
        clocks: Return the time; tests replace them.
        hooks: Called while an environment is built.

    Raises:
        ConcurrencyConfigurationError: The limits allow more than one session, and the environment's class does not.
    """

    def __init__(
        self,
        factory: Factory,
        limits: SessionLimits,
        *,
        runner: Runner | str = "auto",
        processes: ProcessOptions | None = None,
        clocks: SessionClocks | None = None,
        hooks: FactoryHooks | None = None,
    ) -> None:
        self.factory = factory
        self._hooks = hooks or FactoryHooks()
        self.limits = limits
        self.env_cls = factory_class(factory)
        self.listeners: list[SessionListener] = []
        self.wants_origins = False
        self._make_call: CallFactory = SessionCall
        self.observers = StepObservers()
        self._clocks = clocks or SessionClocks()
        self._clock = self._clocks.steady
        self._lock = threading.Lock()
        self._session_listener = SessionCallbacks(self._on_ready, self._on_closed, self._on_error, self._on_closing)
        self._endings = CapacityQueue()  # a drain waits for the ends of sessions
        self.abandoned: dict[str, Session] = {}
        self._is_full_of_abandoned = False
        self.unclosed: list[str] = []
        self._is_hurried = False
        self._close_watch = CloseWatch(lambda: self.limits, self._clock, self._abandon)
        self._closed_environments = ClosedEnvironments(lambda: self.slots.held)
        self.slots = Slots(
            limits,
            self._new_session,
            is_unsure=lambda: self.env_cls is None,
            report=self.report_error,
            abandon=self._abandon,
        )
        self.queue = self.slots.queue
        self.answers: Answers = {}
        self.attachments = Attachments(self.slots.lookup, lambda: self.limits.grace_s, lambda: self.peers)
        self.openings = Openings(self.slots.lookup, lambda: self.limits.grace_s)
        self._reaper = Reaper(self._expired, period_s=limits.reaper_period_s)
        self._check(limits)
        self._runner_spec = runner
        self._processes = processes
        self.runner = self._make_runner()

    def _check(self, limits: SessionLimits) -> None:
        if self.env_cls is not None and limits.sessions > 1 and not _allows_several(self.env_cls, limits):
            raise ConcurrencyConfigurationError(self.env_cls.__name__, limits.sessions)

    def reconfigure(
        self, limits: SessionLimits, *, runner: str | None = None, processes: ProcessOptions | None = None
    ) -> None:
        """Change limits and runner; only before the first session.

        Raises:
            ConcurrencyConfigurationError: The class does not support so many sessions.
            RuntimeError: Sessions are open.
        """
        if self.slots.all():
            raise RuntimeError("sessions are open; limits and runner can only be changed before the first one")
        self._check(limits)
        self.limits = limits
        self.slots.reconfigure(limits)
        self._reaper = Reaper(self._expired, period_s=limits.reaper_period_s)
        self._runner_spec = runner or self._runner_spec
        self._processes = processes or self._processes
        self.runner = self._make_runner()

    @property
    def peers(self) -> Peers:
        """The other processes of the server."""
        return self.slots.peers

    def share(self, peers: Peers) -> None:
        """Share limits and names with other processes; only before the first session."""
        self.slots.share(peers)
        if peers.processes > 1:
            self.runner = self._make_runner()

    def _make_runner(self) -> Runner:
        if not isinstance(self._runner_spec, str):
            return self._runner_spec
        # Decide only if the class is known before the first session: a session never changes its thread.
        return make_runner(
            "inline" if self._runner_spec == "auto" and self.has_short_steps else self._runner_spec,
            max_threads=min(1024, max(64, self.limits.sessions)),
            server_processes=self.peers.processes,
            single_thread=bool(getattr(self.env_cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False)),
            factory=self.factory,
            processes=self._processes,
        )

    @property
    def has_short_steps(self) -> bool:
        """Whether the environment class declares that its steps take microseconds."""
        return bool(getattr(self.env_cls, "RUNS_INLINE", False))

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Slots in use, including other processes."""
        return self.slots.used

    @property
    def max_sessions(self) -> int:
        """The number of slots; falls to one if the first environment does not allow concurrent sessions."""
        return self.slots.count

    @property
    def is_draining(self) -> bool:
        """Whether the manager has stopped admitting."""
        return self.slots.is_closed or self.peers.is_draining

    @property
    def is_quiet(self) -> bool:
        """Whether all sessions are idle."""
        return all(session.is_idle for session in self.slots.all())

    @property
    def is_empty(self) -> bool:
        """Whether all sessions are soft ones, which make room for others anyway."""
        return all(session.kind is SessionKind.SOFT for session in self.slots.all())

    @property
    def is_concurrency_safe(self) -> bool:
        """Whether the environment's class allows concurrent sessions; an unknown class does not."""
        return self.env_cls is not None and _allows_several(self.env_cls, self.limits)

    def sessions(self) -> list[Session]:
        """List the sessions that hold a slot."""
        return self.slots.sessions()

    def find(self, session_id: str) -> Session:
        """Return a live session that clients address by its id; a socket's own session cannot be addressed.

        Raises:
            SessionLost: The session has ended; the reason says how.
            SessionNotFoundError: The session never existed.
            SessionElsewhere: Another process of the server has it.
        """
        try:
            return self._find(session_id)
        except OpenEnvError as exc:
            self.report_error(exc.code)
            raise

    def _find(self, session_id: str) -> Session:
        session, ended = self.slots.lookup(session_id)
        if session is not None:
            if session.kind in (SessionKind.SOCKET, SessionKind.RESUMABLE):
                raise SessionNotFoundError(session_id)
            if not session.is_ending:
                return session
            ended = session.close_reason or "closed"
        if ended is None:
            raise not_found(self.peers, session_id)
        raise SessionLost(client_reason(ended))

    def info(self, session_id: str) -> SessionInfo | None:
        """Describe a session, even an abandoned one; None for an unknown id."""
        session = self.slots.lookup(session_id)[0] or self.abandoned.get(session_id)
        if session is None:
            return None
        shift = self._clocks.wall() - self._clock()
        return SessionInfo(
            session_id=session.id,
            created_at=session.created_at + shift,
            last_activity_at=session.last_activity_at + shift,
            step_count=session.step_count,
            environment_type=class_of(session.env).__name__ if session.env is not None else factory_name(self.factory),
        )

    # -- opening ------------------------------------------------------------------------------------------------

    async def open(
        self,
        kind: SessionKind,
        *,
        wait_s: float = 0.0,
        by_agent: bool = False,
        on_position: OnPosition | None = None,
        on_reserved: Callable[[Session], None] | None = None,
        build: Factory | None = None,
    ) -> Session:
        """Reserve a slot, build the environment, return the session. A cancelled caller leaves nothing behind.

        Args:
            kind: What keeps it alive.
            wait_s: How long to wait for a slot, behind earlier clients.
            by_agent: Whether an agent opens it; agents may have a separate limit.
            on_position: Called with the position in the queue from time to time.
            on_reserved: Called with the session before its environment is built, so that the caller can close it
                while it waits.
            build: Makes the environment; replaces the factory.

        Raises:
            SessionCapacityError: No slot came free in time, or too many clients wait.
            EnvironmentFactoryError: The constructor raised.
            SessionClosedError: The session was closed while it was built.
        """
        session = await self._reserve(kind, by_agent=by_agent, wait_s=wait_s, on_position=on_position)
        if on_reserved is not None:
            on_reserved(session)
            if session.state is SessionState.CLOSED:
                raise session.closed_error()
        await self._construct(session, build)
        return session

    async def _reserve(
        self, kind: SessionKind, *, by_agent: bool, wait_s: float, on_position: OnPosition | None = None
    ) -> Session:
        session = self.reserve_at_once(kind, by_agent=by_agent)
        if session is None:
            waiting = self.slots.reserve_in_turn(kind, by_agent=by_agent, wait_s=wait_s, on_position=on_position)
            session = self._admitted(await waiting)
        return session

    def reserve_at_once(self, kind: SessionKind, *, by_agent: bool = False) -> Session | None:
        """Reserve a slot for `build`; None if `open` would have to wait or refuse."""
        session = self.slots.reserve_at_once(kind, by_agent=by_agent)
        return None if session is None else self._admitted(session)

    @asynccontextmanager
    async def borrow(self, *, is_built: bool = True) -> Any:
        """Build an environment for a single request, without a slot; at most as many at once as the server has slots.

        The session closes afterwards, in the background, unless `keep_soft` gave it a slot meanwhile.

        Args:
            is_built: Wait for the environment. Otherwise calls of the block wait for it in the session's lane, which
                saves a change of threads.

        Raises:
            EnvironmentFactoryError: The constructor raised; if `is_built` is false, at the first call of the block.
        """
        session = self._admitted(await self.slots.reserve(SessionKind.ONCE))
        problems: list[OpenEnvError | None] = []
        try:
            if is_built:
                await self._construct(session)
            else:
                self.build(session, problems.append)
            yield session
        except SessionClosedError as exc:
            problem = problems[0] if problems else None
            if problem is None or problem is exc:
                raise
            raise problem from problem.__cause__  # the constructor's exception
        finally:
            if session.kind is SessionKind.ONCE:
                session.close(REQUEST_DONE)

    def keep_soft(self, session: Session) -> bool:
        """Give a borrowed session a slot, if one is free, so that a cookie can continue it."""
        has_slot = self.slots.keep_soft(session)
        if has_slot:
            self._reaper.ensure_running()
        return has_slot

    async def open_once(self, kind: SessionKind, nonce: str | None, *, wait_s: float = 0.0) -> Session:
        """Open a session, or return the earlier one with the same nonce.

        Raises:
            SessionLost: The session of that nonce has ended.
        """
        try:
            known = self.openings.find(nonce)
        except SessionLost as exc:
            self.report_error(exc.code)
            raise
        if known is not None:
            known.touch()
            return known
        opening = self.openings.begin(
            nonce, lambda opening: self.open(kind, wait_s=wait_s, on_reserved=opening.reserved)
        )
        try:
            return await opening.wait()
        except asyncio.CancelledError:
            opening.leave(is_final=False)
            raise

    def _admitted(self, session: Session) -> Session:
        self._emit("opened", session)
        if session.kind is not SessionKind.ONCE:
            self._reaper.ensure_running()
        return session

    @property
    def retry_after_s(self) -> float:
        """When to try again to get a slot."""
        return self.slots.retry_after_s

    def _new_session(self, kind: SessionKind) -> Session:
        session = Session(
            self.peers.new_id(), kind, lane=self.runner.lane(), clock=self._clock, listener=self._session_listener
        )
        session.on_dropped = self._closed_environments.add
        session.make_calls_with(self._make_call, self.observers.step)
        session.lane.on_lost(session.close)
        return session

    async def _construct(self, session: Session, build: Factory | None = None) -> None:
        future: asyncio.Future[OpenEnvError | None] = asyncio.get_running_loop().create_future()
        self.build(session, lambda problem: None if future.done() else future.set_result(problem), build)
        try:
            problem = await future
        except BaseException:
            session.close(CANCELLED)
            raise
        if problem is not None:
            raise problem

    def build(
        self, session: Session, done: Callable[[OpenEnvError | None], None], build: Factory | None = None
    ) -> None:
        """Build the environment of a reserved session; call `done` with a problem or None, on the running loop.

        Args:
            session: The session.
            done: Receives the problem.
            build: Makes the environment; replaces the factory.
        """

        def built(_: Any, error: BaseException | None) -> None:
            done(self._problem(session, error))

        make = build or partial(session.lane.construct, self.factory)
        session.construct(partial(self._build, make), built, current_dispatcher())

    def _build(self, make: Factory) -> Any:
        env = make()
        self._hooks.prepare(env)
        return env

    def _problem(self, session: Session, error: BaseException | None) -> OpenEnvError | None:
        """Return the error for the client that opens a session, if the constructor failed or the session ended."""
        if isinstance(error, NotForkable):
            self.report_error(error.code, session)
            return error
        if error is not None:
            name = factory_name(self.factory)
            text = "session %s: the environment factory %s failed"
            logger.error(text, session.id, name, exc_info=author_exc_info(error))
            problem = EnvironmentFactoryError(name, reason=self._hooks.explain(error))
            self.report_error(problem.code, session)
            problem.__cause__ = error
            return problem
        if session.is_ending:
            return session.closed_error()
        return None

    # -- copies -------------------------------------------------------------------------------------------------

    async def fork(
        self, session: Session, n: int, *, kind: SessionKind, by_agent: bool = False, wait_s: float = 0.0
    ) -> list[Session]:
        """Open copies of a session, after its earlier calls have run: all of them or none.

        Args:
            session: The session to copy.
            n: How many copies.
            kind: What keeps the copies alive.
            by_agent: Whether an agent opens them.
            wait_s: How long to wait for their slots.

        Raises:
            NotForkable: The environment cannot be copied.
            SessionCapacityError: Not enough slots came free in time.
            SessionClosedError: The session was closed meanwhile.
        """
        work = self.forking(session, n, kind=kind, by_agent=by_agent, wait_s=wait_s)
        copies: list[Session] = await session.run(FORK, work, cancellable=True)
        return copies

    def forking(
        self, session: Session, n: int, *, kind: SessionKind, by_agent: bool = False, wait_s: float = 0.0
    ) -> Callable[[], Awaitable[list[Session]]]:
        """Return the argument of a `FORK` that does the same; for surfaces that submit calls themselves."""
        return partial(self._fork, session, n, kind, by_agent, wait_s)

    async def _fork(self, session: Session, n: int, kind: SessionKind, by_agent: bool, wait_s: float) -> list[Session]:
        self._require_concurrency(session)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        copies: list[Session] = []
        try:
            while len(copies) < n:
                left_s = max(0.0, deadline - loop.time())
                copied = await self._reserve(kind, by_agent=by_agent, wait_s=left_s)
                copied.is_unclaimed = True
                copies.append(copied)
            environments = await self._copy(session, [copied.lane for copied in copies])
            building = zip(copies, environments, strict=True)
            await asyncio.gather(*(self._construct(copied, environment.build) for copied, environment in building))
        except SessionClosedError as exc:  # a copy was closed; the session itself continues
            self._close_all(copies)
            raise NotForkable(f"A copy ended while it was made ({client_reason(exc.reason)}).") from exc
        except BaseException:
            self._close_all(copies)
            raise
        for copied in copies:
            copied.continue_episode(session)
        return copies

    async def copy_environment(self, session: Session, n: int) -> list[EnvironmentCopy]:
        """Copy the environment of a session, for other managers; not possible with the `process` runner.

        Raises:
            NotForkable: The environment cannot be copied.
        """
        self._require_concurrency(session)
        work = partial(self._copy, session, [session.lane] * n)
        copies: list[EnvironmentCopy] = await session.run(FORK, work, cancellable=True)
        return copies

    def _require_concurrency(self, session: Session) -> None:
        cls = class_of(session.env)
        if not _allows_several(cls, self.limits):
            raise NotForkable(
                f"{cls.__name__} does not declare SUPPORTS_CONCURRENT_SESSIONS = True, so only one instance may exist "
                "at a time. Set the attribute if instances share no state."
            )

    @staticmethod
    def _close_all(sessions: list[Session]) -> None:
        for session in sessions:
            session.close(CANCELLED)

    async def _copy(self, session: Session, lanes: list[Lane]) -> list[EnvironmentCopy]:
        """Copy the environment of a session during its `FORK`; each copy is for one of the lanes."""
        env = session.env
        if isinstance(env, RemoteEnvironment):
            return await session.lane.fork(lanes)
        copies: list[EnvironmentCopy] = await session.run_in_lane(
            lambda: copies_of(env, len(lanes), self.factory), kind="fork"
        )
        return copies

    async def restore(self, session: Session, source: Session) -> None:
        """Replace a session's environment by a copy of another session's, and close the former environment.

        Args:
            session: The session.
            source: The other one.

        Raises:
            NotForkable: The other session is gone, or its environment cannot be copied. If the environment's `restore`
                failed, the session is closed.
            RequestValidationError: The two sessions would wait for each other.
            SessionClosedError: The session was closed meanwhile.
        """
        await session.run(RESTORE, partial(self._restore, session, source), cancellable=True)

    def restoring(self, session: Session, token: str) -> Callable[[], Awaitable[None]]:
        """Return the argument of a `RESTORE` from a token's session; for surfaces that submit calls themselves."""

        async def restore() -> None:
            try:
                source = self.attachments.claimed(token)
            except SessionLost as exc:  # the other session is lost, not this one
                raise _gone(exc.reason) from exc
            await self._restore(session, source)

        return restore

    async def _restore(self, session: Session, source: Session) -> None:
        # The copy waits for the source's calls, so two sessions that restore from each other would wait forever.
        waits_for: Session | None = source
        while waits_for is not None:
            if waits_for is session:
                raise RequestValidationError("A session cannot be restored from itself, nor two from each other.")
            waits_for = waits_for.restored_from
        session.restored_from = source
        try:
            # The session briefly has two environments. Like a single request, the second one takes no slot.
            spare = self._admitted(await self.slots.reserve(SessionKind.ONCE))
            try:
                await self._restore_by(spare, session, source)
            finally:
                spare.close(REQUEST_DONE)
        finally:
            session.restored_from = None

    async def _restore_by(self, spare: Session, session: Session, source: Session) -> None:
        try:
            copies = await source.run(FORK, partial(self._copy, source, [spare.lane]), cancellable=True)
        except (SessionClosedError, SessionLost) as exc:
            raise _gone(exc.reason) from exc
        (copied,) = copies
        if copied.put_into is not None:
            try:
                await session.run_in_lane(partial(copied.put_into, session.env), kind="restore")
            except BaseException:
                session.close(RESTORE_FAILED)  # its state may be a mixture of both
                raise
        else:
            try:
                await self._construct(spare, copied.build)
            except SessionClosedError as exc:
                raise NotForkable(f"The copy ended while it was made ({client_reason(exc.reason)}).") from exc
            if not session.exchange_environments(spare):
                raise NotForkable("The session, or the copy for it, ended meanwhile.")
        session.continue_episode(source)

    def make_calls_with(
        self, factory: CallFactory, *, with_origins: bool = False, observe_step: ObserveStep | None = None
    ) -> None:
        """Change the call factory of all sessions, for telemetry.

        Args:
            factory: Makes a call.
            with_origins: Whether surfaces have to pass on the origins of requests, which costs time.
            observe_step: Receives the times of steps; with it, steps still run in groups.
        """
        self.wants_origins = self.wants_origins or with_origins
        self._make_call, self.observers.step = factory, observe_step
        for session in self.slots.all():
            session.make_calls_with(factory, observe_step)

    # -- what sessions report, from any thread ------------------------------------------------------------------

    def _on_ready(self, session: Session, error: BaseException | None) -> None:
        if error is not None:
            self._emit("failed", session, message_of(error))
            return
        if self.env_cls is None:
            self._learn_class(session)
        self._emit("ready", session)

    def _on_error(self, session: Session, error: BaseException) -> None:
        if isinstance(error, NonFiniteReward) and not session.reward_was_logged:
            session.reward_was_logged = True
            logger.warning("session %s: %s Later ones of this session are only counted.", session.id, error)
        self.report_error(error.code if isinstance(error, OpenEnvError) else "EXECUTION_ERROR", session)

    def _learn_class(self, session: Session) -> None:
        with self._lock:
            self.env_cls = cls = class_of(session.env)
            if self.slots.count > 1 and not _allows_several(cls, self.limits):
                logger.error("%s", ConcurrencyConfigurationError(cls.__name__, self.slots.count))
                self.slots.count = 1
        self.peers.learned_class(is_concurrent=_allows_several(cls, self.limits))
        if getattr(cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
            self.runner.pin(session.lane)
        self.slots.look_again()

    def _on_closing(self, session: Session) -> None:
        self._close_watch.add(session)
        self.slots.note_closing(session)

    def _on_closed(self, session: Session) -> None:
        self._close_watch.discard(session)
        if self.abandoned.pop(session.id, None) is not None:
            logger.warning("session %s: its environment is closed after all", session.id)
        self._give_up(session)
        self._notify(SessionEvent("closed", session.id, session.close_reason, session.step_count, session.ledger.hits))

    def _give_up(self, session: Session) -> None:
        """Take back the slot of a session, and tell its holder and a drain."""
        self.slots.give_back(session)
        holder = session.holder
        if holder is not None and session.detach(holder):
            holder.let_go(session, client_reason(session.close_reason))
        self._endings.call_all()

    def _abandon(self, session: Session, passed_s: float) -> bool:
        """Abandon a closing session that hangs; return False if that is not possible.

        Its environment and its thread stay in memory. So at most as many sessions are abandoned as the server has
        slots; further ones keep their slots.
        """
        if len(self.abandoned) >= self.slots.count:
            if not self._is_full_of_abandoned:
                self._is_full_of_abandoned = True
                logger.error("%d sessions do not end; further ones keep their slots", len(self.abandoned))
            return False
        self._is_full_of_abandoned = False
        hangs_in = session.hangs_in
        if not session.abandon():
            return False
        self.abandoned[session.id] = session
        logger.error(
            "session %s (%s) is abandoned: %s has not returned for %.1f s; its slot is free, its environment is not",
            session.id,
            session.close_reason,
            hangs_in,
            passed_s,
        )
        self._give_up(session)
        self._emit("abandoned", session, session.close_reason)
        if session.state is SessionState.CLOSED:  # it was closed meanwhile
            self.abandoned.pop(session.id, None)
        return True

    def _emit(self, name: Any, session: Session, reason: str | None = None) -> None:
        self._notify(SessionEvent(name, session.id, reason))

    def report_error(self, code: str, session: Session | None = None) -> None:
        """Report an error reply to a request."""
        self._notify(SessionEvent("error", session.id if session is not None else "", code))

    def _notify(self, event: SessionEvent) -> None:
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a session listener failed")

    # -- ending -------------------------------------------------------------------------------------------------

    def _expired(self) -> bool:
        return close_expired(self.sessions(), self.limits, self._clock())

    def stop_admitting(self) -> None:
        """Open no more sessions, and refuse waiting clients; running sessions continue."""
        self.slots.close()

    async def drain(self, limit_s: float | None = None) -> list[str]:
        """Stop admitting, let running calls finish within the limit, close every environment, stop the threads.

        Args:
            limit_s: How long that may take; by default `drain_s` of the limits.

        Returns:
            The ids of sessions with an unclosed environment; also stored in `unclosed`.
        """
        self.stop_admitting()
        self._reaper.stop()
        limit_s = self.limits.drain_s if limit_s is None else limit_s
        limit_s = min(limit_s, HURRIED_S) if self._is_hurried else limit_s
        deadline = asyncio.get_running_loop().time() + limit_s
        for session in self.slots.all():
            session.close(SHUTTING_DOWN)
        ticket = self._endings.join()
        assert ticket is not None
        try:
            while (left := self.slots.all()) and (now := ticket.loop.time()) < deadline:
                await ticket.wait(min(deadline, now + _LOOK_S))
                self._endings.wait_again(ticket)
                if self._is_hurried:
                    deadline = min(deadline, ticket.loop.time() + HURRIED_S)
        finally:
            self._endings.leave(ticket)
        self.unclosed = self._report_unclosed(left, limit_s)
        await asyncio.get_running_loop().run_in_executor(None, self.runner.close, 1.0 if self.unclosed else 5.0)
        return self.unclosed

    def hurry(self) -> None:
        """Limit a current or later drain to `HURRIED_S`."""
        self._is_hurried = True  # nothing else: a signal handler calls this, and the thread may hold a lock

    def close_at_exit(self) -> None:
        """Close the remaining sessions at the end of a process without a drain, and report failures.

        This happens if another application mounts ours and does not run our lifespan.
        """
        sessions = self.slots.all()
        if not sessions:
            return
        self.stop_admitting()
        for session in sessions:  # use threads: the loop has ended, so a coroutine would run in this thread
            threading.Thread(target=session.close, args=(SHUTTING_DOWN,), daemon=True).start()
        deadline = time.monotonic() + min(self.limits.drain_s, EXIT_S)
        while (left := self.slots.all()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.unclosed = self._report_unclosed(left, EXIT_S)

    def _report_unclosed(self, left: list[Session], limit_s: float) -> list[str]:
        """Log and return the sessions with an unclosed environment at the end of a shutdown."""
        unclosed = {session.id: session for session in (*self.abandoned.values(), *left)}
        for session in unclosed.values():
            logger.error("session %s: its environment was not closed: %s does not return", session.id, session.hangs_in)
        if unclosed:
            logger.warning("%d session(s) did not end within %.0f s of shutdown", len(unclosed), limit_s)
        return list(unclosed)

    def resume(self) -> None:
        """Admit again after a drain, for an application that is restarted in the same process."""
        if self.slots.is_closed:
            self.runner = self._make_runner()
            self.slots.is_closed = self._is_hurried = False
            self.unclosed = []


def _gone(reason: str) -> NotForkable:
    return NotForkable(f"The session to restore from is gone ({client_reason(reason)}).")


def _allows_several(env_cls: type[Any], limits: SessionLimits) -> bool:
    """Return whether a class may have several instances at once: by its declaration, else by the limits."""
    declared = declared_concurrency(env_cls)
    return limits.separate if declared is None else declared
