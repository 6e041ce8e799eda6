"""`Session`: one environment, one life, one call at a time.

    CREATING ──┬──> READY <───── call ─────> BUSY
               │     │  ^                     ^
               │ detach attach                │
               │     v  │                     │
               └──> DETACHED <──── call ──────┘

    every state ── close ──> CLOSING ─────────────> CLOSED
                                │                     ^
                                └─ abandon ─> ABANDONED (its code ends after all, or never)

READY and DETACHED are idle. DETACHED exists for resumable sessions only: no connection holds the session, and a client
can attach with its token. If the connection is lost while the session is BUSY, it stays BUSY until its last call ends.
An ABANDONED session holds no slot: its last call or the environment's `close` hangs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol

from openenv.env.binding import OFFLOAD, bind_instance
from openenv.errors import (
    ExecutionError,
    NonFiniteReward,
    OpenEnvError,
    RequestCancelled,
    SessionClosedError,
    message_of,
)

from ..author_frames import author_exc_info, author_place
from ..runners import Dispatcher, Lane, current_dispatcher
from .events import EpisodeStats, RequestOrigin
from .ledger import Ledger
from .operations import CLOSE, CONSTRUCT, Operation, closes_at_once

logger = logging.getLogger(__name__)

Done = Callable[[Any, BaseException | None], None]
"""Receives the result of a call, or its error."""


class SessionState(str, Enum):
    """The states of a session."""

    CREATING = "creating"
    READY = "ready"
    BUSY = "busy"
    DETACHED = "detached"
    CLOSING = "closing"
    ABANDONED = "abandoned"
    CLOSED = "closed"


# Looking up an enum member costs four times as much as a global, and every step needs several.
_CREATING, _READY, _BUSY = SessionState.CREATING, SessionState.READY, SessionState.BUSY
_DETACHED, _CLOSING, _CLOSED = SessionState.DETACHED, SessionState.CLOSING, SessionState.CLOSED
_ABANDONED = SessionState.ABANDONED

_INTERRUPT_AGAIN_S: Final = 0.05
REQUEST_DONE: Final = "request done"
"""The close reason of a session for a single request."""
NEVER_RESET: Final = " (reset() has not been called in this session yet)"


class SessionKind(str, Enum):
    """What keeps a session alive: a socket, an HTTP client, a cookie, a single request, or its resume token."""

    SOCKET = "socket"
    HTTP = "http"
    SOFT = "soft"
    ONCE = "once"
    RESUMABLE = "resumable"


class Cancellable(Protocol):
    """Work that a session is busy with: a call, or a group of steps."""

    def cancel(self, session: Session) -> None:
        """End the work for a session early, if possible."""
        ...


class SessionHolder(Protocol):
    """A connection with attached sessions."""

    def let_go(self, session: Session, reason: str) -> None:
        """Forget the session: it has ended, or another connection has attached to it. Called from any thread."""
        ...

    def holds_back(self, session: Session) -> bool:
        """Return whether the session must wait with its next call, because the client does not read replies.

        The holder calls `continue_calls` later. Called from any thread, under the session's lock.
        """
        ...


class SessionCall:
    """One request to a session, and its outcome.

    It runs in the session's lane, or as a coroutine on the requester's loop if the environment overrides the async
    method. `done` receives the outcome once, always on the requester's loop.
    """

    __slots__ = (
        "_dispatcher", "_done", "_session", "argument", "error", "kind", "operation", "origin", "result", "task",
    )  # fmt: skip

    count = 1

    def __init__(
        self,
        session: Session,
        operation: Operation,
        argument: Any,
        done: Done,
        dispatcher: Dispatcher,
        origin: RequestOrigin | None = None,
    ) -> None:
        self._session = session
        self.operation = operation
        self.kind: str = operation.kind
        self.argument = argument
        self._done = done
        self._dispatcher = dispatcher
        self.origin = origin
        self.result: Any = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def dispatcher(self) -> Dispatcher | None:
        """The dispatcher, for calls whose requester returns to its loop; the caller of `close` may block the loop."""
        return None if self.kind == "close" else self._dispatcher

    def run(self) -> None:
        """Do the work, in the lane."""
        session = self._session
        try:
            self.result = self.operation.in_lane(session.env, self.argument)
        except BaseException as exc:  # `sys.exit` in an environment counts as a failure and must not end the thread
            self.error = exc
        session._finished(self)

    async def _run_in_loop(self) -> None:
        session = self._session
        assert self.operation.in_loop is not None
        OFFLOAD.set(session.run_in_lane)  # in this task's context: blocking parts of the coroutine go to the lane
        try:
            self.result = await self.operation.in_loop(session.env, self.argument)
        except asyncio.CancelledError:
            reason = session.close_reason
            self.error = RequestCancelled() if reason is None else SessionClosedError(session.id, reason)
        except BaseException as exc:
            self.error = exc
        session._finished(self)

    def launch(self) -> None:
        """Start the coroutine on the requester's loop, or on a new loop if that one has ended."""
        if self.kind == "close" and asyncio._get_running_loop() is not None:
            # The loop of the session may have ended, or the caller may block it (`LocalEnv.sync()`).
            self._dispatcher = current_dispatcher()
        loop = self._dispatcher.loop
        if self._dispatcher.is_current:
            self._start_task()
        elif loop.is_running():
            loop.call_soon_threadsafe(self._start_task)
        else:
            asyncio.run(self._run_in_loop())

    def _start_task(self) -> None:
        session = self._session
        if session.is_ending and self.kind != "close":  # the session was closed before the coroutine could begin
            self.error = session.closed_error()
            session._finished(self)
            return
        self.task = self._dispatcher.loop.create_task(self._run_in_loop())

    def cancel(self, session: Session) -> None:
        """Interrupt a coroutine, or a tool in the lane; other code in a thread cannot be interrupted."""
        if self.task is not None:
            self._dispatcher.loop.call_soon_threadsafe(self.task.cancel)
        else:
            interrupt(session, self, self.operation, self._dispatcher)

    def settle(self, error: BaseException | None = None) -> None:
        """Deliver the outcome, on the requester's loop."""
        if error is not None:
            self.error = error
        if self.error is not None and self.kind != "construct":  # the manager reports failed constructors itself
            reply = self._session.report_error(self.error)
            if reply is not None:
                self.result, self.error = reply, None
        self._dispatcher.hand_over(self)

    def deliver(self) -> None:
        """Hand the outcome over; called on the requester's loop."""
        self._done(self.result, self.error)


class ClosingCall(SessionCall):
    """The environment's `close`, the last call of a session; nothing waits for its outcome."""

    __slots__ = ()

    def __init__(self, session: Session, dispatcher: Dispatcher) -> None:
        super().__init__(session, CLOSE, None, lambda result, error: None, dispatcher)

    def run(self) -> None:
        """Close the environment, in the lane."""
        self._session.close_began()
        super().run()

    async def _run_in_loop(self) -> None:
        self._session.close_began()
        await super()._run_in_loop()


CallFactory = Callable[["Session", Operation, Any, Done, Dispatcher, "RequestOrigin | None"], SessionCall]
WrapFactory = Callable[[CallFactory], CallFactory]
"""Wraps a call factory, for a recording."""
ObserveStep = Callable[[float, float, float], None]
"""Receives the seconds that a step waited, ran, and took to return."""


def interrupt(session: Session, call: Cancellable, operation: Operation, dispatcher: Dispatcher) -> None:
    """Interrupt code in a session's lane. Repeat until its call has ended, because the tool may not have begun yet."""
    if session._running is not call or operation.interrupt is None:
        return
    operation.interrupt(session.env)
    loop = dispatcher.loop
    if loop.is_running():
        again = (interrupt, session, call, operation, dispatcher)
        loop.call_soon_threadsafe(loop.call_later, _INTERRUPT_AGAIN_S, *again)


@dataclass(frozen=True, slots=True)
class SessionCallbacks:
    """Called with a session when something happens to it; from any thread.

    Args:
        on_ready: The constructor has ended, with its error or None.
        on_closed: The environment is closed.
        on_error: A request has failed.
        on_closing: The session begins to end.
    """

    on_ready: Callable[[Session, BaseException | None], None]
    on_closed: Callable[[Session], None]
    on_error: Callable[[Session, BaseException], None] | None = None
    on_closing: Callable[[Session], None] | None = None


class Session:
    """One environment and the calls waiting for it. Methods may be called from any thread.

    Args:
        session_id: Its id.
        kind: What keeps it alive.
        lane: Runs its blocking code.
        clock: A steady clock.
        listener: Called when something happens to the session.
    """

    # Slots, because CPython's instances share the keys of their dictionaries only up to 30 attributes. With more, each
    # attribute costs more time and memory in every step (`benchmarks/instructions.py`).
    __slots__ = (
        "__weakref__",
        "_async_kinds",
        "_base_factory",
        "_clock",
        "_close_after_detach",
        "_dispatcher",
        "_idle_state",
        "_lock",
        "_on_closed",
        "_on_closing",
        "_on_error",
        "_on_ready",
        "_running",
        "_steps_in_loop",
        "_waiting",
        "_wrap_factory",
        "by_agent",
        "calls_alone",
        "client_left",
        "close_began_at",
        "close_reason",
        "closing_at",
        "created_at",
        "ends_with_call",
        "env",
        "episode",
        "holder",
        "id",
        "is_unclaimed",
        "kind",
        "lane",
        "last_activity_at",
        "ledger",
        "make_call",
        "observe_step",
        "on_dropped",
        "restored_from",
        "reward_was_logged",
        "secret",
        "state",
        "step_count",
        "was_reset",
    )

    def __init__(
        self,
        session_id: str,
        kind: SessionKind,
        *,
        lane: Lane,
        clock: Callable[[], float],
        listener: SessionCallbacks,
    ) -> None:
        self.id = session_id
        self.kind = kind
        self.state = _CREATING
        self.env: Any = None
        self.lane = lane
        self.created_at = self.last_activity_at = clock()
        self.step_count = 0
        self.close_reason: str | None = None
        self.closing_at: float | None = None  # when `close` was requested
        self.close_began_at: float | None = None  # when the environment's `close` began
        self.holder: SessionHolder | None = None  # only `attach` and `detach` write it
        self.is_unclaimed = False  # whether this is a copy that no client has attached to yet
        self.client_left = False
        self.ends_with_call = (
            False  # whether the environment is closed right after the running call, if that cannot hang
        )
        self.secret = ""
        self.ledger = Ledger()
        self.by_agent = False  # whether an agent has opened it, not an orchestrator
        self.episode = EpisodeStats()
        self.was_reset = False
        self.reward_was_logged = False  # whether the log has a reward that was not a finite number
        self.restored_from: Session | None = None  # only during a restore
        self.make_call: CallFactory = SessionCall
        self.calls_alone = False  # whether each call is watched, so that steps cannot run in groups
        self.observe_step: ObserveStep | None = None
        self.on_dropped: Callable[[Any], None] | None = None  # receives the closed environment
        self._clock = clock
        self._on_ready = listener.on_ready
        self._on_closed = listener.on_closed
        self._on_error = listener.on_error
        self._on_closing = listener.on_closing
        # The state without a running call, stored to avoid a decision at the end of every step.
        self._idle_state = _DETACHED if kind is SessionKind.RESUMABLE else _READY
        self._close_after_detach: str | None = None
        self._dispatcher: Dispatcher | None = None  # the dispatcher of the loop that opened the session
        self._running: Cancellable | None = None  # None in BUSY: the next call is held back
        self._waiting: deque[SessionCall] = deque()
        self._async_kinds: frozenset[str] = frozenset()
        self._steps_in_loop = False
        self._base_factory: CallFactory = SessionCall
        self._wrap_factory: WrapFactory | None = None
        self._lock = threading.Lock()

    @property
    def is_ending(self) -> bool:
        """Whether the session is closing or closed."""
        return self.state is _CLOSING or self.state is _CLOSED or self.state is _ABANDONED

    @property
    def is_idle(self) -> bool:
        """Whether the session neither runs nor queues a call."""
        return self.state is _READY or self.state is _DETACHED

    @property
    def is_attached(self) -> bool:
        """Whether a connection holds the session; a v1 socket holds its session for life."""
        return self.holder is not None or self.kind is SessionKind.SOCKET

    @property
    def is_detached(self) -> bool:
        """Whether a resumable session has lost its connection, even while its last call still runs."""
        return self.state is _DETACHED or (self.state is _BUSY and self._idle_state is _DETACHED)

    @property
    def unused_s(self) -> float:
        """Seconds since the session was last used."""
        return self._clock() - self.last_activity_at

    def touch(self) -> None:
        """Record that the session is in use."""
        with self._lock:
            self.last_activity_at = self._clock()

    def report_error(self, error: BaseException) -> Any:
        """Report that a request of this session failed; return the reply to send instead of the error, if any.

        A session in a worker process reports nothing: its server receives the error, with the reply, and reports it.
        """
        if self._on_error is None:
            return None
        if self.kind is SessionKind.ONCE and isinstance(error, SessionClosedError):
            return None  # the request has one answer: the constructor's failure, which the manager reports
        self._on_error(self, error)
        return error.reply if isinstance(error, NonFiniteReward) else None

    def closed_error(self) -> SessionClosedError:
        """Return the error for requests after the end."""
        return SessionClosedError(self.id, self.close_reason or "closed")

    # -- connections ----------------------------------------------------------------------------------------------

    def attach(self, holder: SessionHolder) -> SessionHolder | None:
        """Make a connection the session's holder; return the former holder."""
        with self._lock:
            former, self.holder = self.holder, holder
            self.is_unclaimed = False
            self.last_activity_at = self._clock()
            self._idle_state = _READY  # a busy session enters this state at the end of its call
            if self.state is _DETACHED:
                self.state = _READY
        self.continue_calls()  # the former holder may have held calls back
        return None if former is holder else former

    def detach(self, holder: SessionHolder, *, client_left: bool = False) -> bool:
        """Detach a connection; return False if another connection already holds the session.

        Args:
            holder: The connection.
            client_left: Whether the session's client has probably left too, which shortens the lease.
        """
        with self._lock:
            if self.holder is not holder:
                return False
            self.holder = None
            self.last_activity_at = self._clock()  # the grace period begins now, or at the end of a running call
            self.client_left = self.client_left or client_left
            if self.kind is SessionKind.RESUMABLE:
                self._idle_state = _DETACHED
                if self.state is _READY:
                    self.state = _DETACHED
            reason = self._close_after_detach
        if reason is not None:
            self.close(reason)
        else:
            self.continue_calls()  # the ledger stores replies for a client that comes back
        return True

    def close_when_detached(self, reason: str) -> bool:
        """Close the session now, or when its connection detaches; return whether it was closed now."""
        with self._lock:
            if self.is_attached:
                self._close_after_detach = reason
                return False
        self.close(reason)
        return True

    # -- calls ----------------------------------------------------------------------------------------------------

    def construct(self, factory: Callable[[], Any], done: Done, dispatcher: Dispatcher) -> None:
        """Build the environment in the lane; the first call, made once."""
        call = self.make_call(self, CONSTRUCT, factory, done, dispatcher, None)
        self._dispatcher = dispatcher
        self._running = call
        self.lane.submit(call, dispatcher)

    def submit(
        self,
        operation: Operation,
        argument: Any,
        done: Done,
        dispatcher: Dispatcher,
        origin: RequestOrigin | None = None,
    ) -> SessionCall:
        """Queue an operation; `done(result, error)` is called once, on the dispatcher's loop."""
        call = self.make_call(self, operation, argument, done, dispatcher, origin)
        with self._lock:
            state = self.state
            if state is _READY or state is _DETACHED:
                self.state = _BUSY
                self._running = call
                self.last_activity_at = self._clock()
            elif state is _BUSY or state is _CREATING:
                self._waiting.append(call)
                return call
        # Outside of the lock: the inline runner runs the call right here, and its end takes the lock again.
        if state is _READY or state is _DETACHED:
            self.start(call)
        else:
            call.settle(self.closed_error())
        return call

    def start(self, call: SessionCall) -> None:
        """Run a call that the session is reserved for."""
        operation = call.operation
        if (
            operation.in_loop is None
            or call.kind not in self._async_kinds
            or (operation.prefers_lane is not None and operation.prefers_lane(self.env, call.argument))
        ):
            if call.kind != "close":
                self.lane.submit(call, call._dispatcher)
            elif closes_at_once(self.env):
                # Without a dispatcher, because the caller of `close` may block the loop; a single request does not.
                self.lane.submit(call, call._dispatcher if self.kind is SessionKind.ONCE else None)
            else:
                self.lane.submit_close(call)
        else:
            call.launch()

    def make_calls_with(self, factory: CallFactory, observe_step: ObserveStep | None) -> None:
        """Replace the call factory, for telemetry."""
        self._base_factory, self.observe_step = factory, observe_step
        self.calls_alone = factory is not SessionCall and observe_step is None
        self.make_call = factory if self._wrap_factory is None else self._wrap_factory(factory)

    def wrap_calls(self, wrap: WrapFactory | None) -> None:
        """Wrap the call factory; None restores the original."""
        self._wrap_factory = wrap
        self.make_call = self._base_factory if wrap is None else wrap(self._base_factory)

    def begin_step(self, group: Cancellable, operation: Operation, action: Any) -> bool:
        """Reserve the session for a grouped step; return False if the step has to be a separate call.

        It has to be if its code does not block, if each call is watched, or if the session is busy or ending.
        """
        if self.calls_alone:
            return False
        if self._steps_in_loop and not (operation.prefers_lane and operation.prefers_lane(self.env, action)):
            return False
        with self._lock:
            if self.state is not _READY:  # DETACHED is impossible: a batch arrives on the session's connection
                return False
            self.state = _BUSY
            self._running = group
        return True

    def end_step(self, *, failed: bool, began: bool = False) -> SessionCall | None:
        """Release the session after a grouped step, or reset, in its lane; return the next call to start."""
        with self._lock:
            self.last_activity_at = self._clock()
            if began:
                self.episode = EpisodeStats()
                self.was_reset = True
            elif not failed:
                self.step_count += 1
            if self.state is _BUSY and not self._waiting:  # as in `_finished`
                self.state = self._idle_state
                self._running = None
                return None
            return self._next_call()

    async def run(
        self,
        operation: Operation,
        argument: Any = None,
        *,
        cancellable: bool = False,
        is_last: bool = False,
        origin: RequestOrigin | None = None,
    ) -> Any:
        """Run an operation and wait for its result.

        Args:
            operation: The operation.
            argument: The operation's argument.
            cancellable: Whether cancelling the wait cancels the operation too; otherwise it runs to its end.
            is_last: Whether the caller closes the session afterwards. A thread may do so at once, which saves a turn.
            origin: The origin of the request, for logs and traces.
        """
        dispatcher = current_dispatcher()
        future: asyncio.Future[Any] = dispatcher.loop.create_future()
        call = self.submit(operation, argument, _settler(future), dispatcher, origin)
        self.ends_with_call = is_last  # not earlier: the constructor may end before the call is queued
        try:
            return await future
        except asyncio.CancelledError:
            if cancellable:
                self.cancel(call)
            raise

    async def run_in_lane(self, function: Callable[[], Any], *, kind: str = "step") -> Any:
        """Run a blocking part of the running call in the session's lane."""
        dispatcher = current_dispatcher()
        future: asyncio.Future[Any] = dispatcher.loop.create_future()
        self.lane.submit(_LanePart(function, future, dispatcher, kind))
        return await future

    def continue_episode(self, other: Session) -> None:
        """Take over another session's episode: the environment is a copy of its environment."""
        self.episode = replace(other.episode)
        self.was_reset = other.was_reset

    def exchange_environments(self, other: Session) -> bool:
        """Exchange environments and lanes with an idle session.

        Call this during a call of this session. Return False, without any effect, if one of the sessions is ending.
        """
        with self._lock, other._lock:
            if self.is_ending or other.is_ending:
                return False
            self.env, other.env = other.env, self.env
            self.lane, other.lane = other.lane, self.lane
        for session in (self, other):
            session.lane.on_lost(session.close)
        return True

    def cancel(self, call: Cancellable) -> bool:
        """Remove a queued call or interrupt a running one; return False if the call has ended."""
        with self._lock:
            is_running = self._running is call
            waiting = next((one for one in self._waiting if one is call), None)
            if waiting is not None:
                self._waiting.remove(waiting)
        if waiting is not None:  # it has not begun, so its request can be answered at once
            waiting.settle(RequestCancelled())
        if is_running:
            call.cancel(self)
        return is_running or waiting is not None

    def _finished(self, call: SessionCall) -> None:
        """Record a finished call and start the next; runs in the lane or on the loop, like the call."""
        kind = call.kind
        if kind == "close":
            self._end(call.error)
            return
        if kind == "construct":
            self._constructed(call)
            return
        with self._lock:
            self.last_activity_at = self._clock()
            if kind == "step":
                if has_stepped(call.error):
                    self.step_count += 1
            elif kind == "reset":
                self.episode = EpisodeStats()
                self.was_reset = True
            if self.state is _BUSY and not self._waiting and not self.ends_with_call:  # the common case
                self.state = self._idle_state
                self._running = following = None
            else:
                following = self._next_call()
        call.settle()
        if following is not None:
            self.start(following)

    def _next_call(self) -> SessionCall | None:
        """Choose the next call; the caller holds the lock."""
        following: SessionCall | None = None
        if self.state is not _BUSY and self.is_ending:  # the first condition is cheap and usually false
            following = self._closing_call() if self.env is not None else None
        elif self._waiting:
            self.state = _BUSY
            if self.holder is None or not self.holder.holds_back(self):
                following = self._waiting.popleft()
        elif self.ends_with_call and closes_at_once(self.env):
            self.state, self.close_reason = _CLOSING, REQUEST_DONE
            following = self._closing_call()
        else:
            self.state = self._idle_state
        self._running = following
        return following

    def continue_calls(self) -> None:
        """Start the next call if it was held back; may be called at any time."""
        with self._lock:
            if self.state is not _BUSY or self._running is not None:
                return
            following = self._next_call()
        if following is not None:
            self.start(following)

    def _constructed(self, call: SessionCall) -> None:
        """Record that the environment is built, or that building it failed."""
        if call.error is None:
            self.env = call.result
            try:
                self._async_kinds = bind_instance(self.env).async_kinds | {"tool", "fork", "restore"}
                self._steps_in_loop = "step" in self._async_kinds
            except Exception as exc:
                call.error = exc
            call.result = self
        error = call.error
        self._on_ready(self, error)  # before the state changes: other sessions wait for the class of the first one
        with self._lock:
            self.last_activity_at = self._clock()
            if error is not None:
                if self.state is not _ABANDONED:
                    self.state = _CLOSING
                self.close_reason = self.close_reason or "factory failed"
            following = self._next_call()
        call.settle()
        if following is not None:
            self.start(following)
        elif error is not None:
            self._end(None)

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self, reason: str = "closed") -> None:
        """End the session: refuse waiting calls, interrupt the running one, then close the environment in its lane."""
        with self._lock:
            if self.is_ending:
                return
            self.state = _CLOSING
            self.close_reason = reason
            self.closing_at = self._clock()
            refused, self._waiting = self._waiting, deque()
            running = self._running
            is_built = self._dispatcher is not None
            closing = None
            if running is None and is_built:
                closing = self._running = self._closing_call()
        for call in refused:
            call.settle(self.closed_error())
        ends_soon = closing is not None and closes_at_once(self.env)
        if self._on_closing is not None and not ends_soon:
            self._on_closing(self)
        self.lane.ending()  # before the environment's `close`, which may hang
        if not is_built:  # the client left before the constructor was called
            self._end(None)
        if running is not None:  # `_next_call` closes the environment after it
            running.cancel(self)
        if closing is not None:
            self.start(closing)
        if (
            self._on_closing is not None and ends_soon and self.state is _CLOSING
        ):  # another session may block the thread
            self._on_closing(self)

    def _closing_call(self) -> SessionCall:
        assert self._dispatcher is not None
        return ClosingCall(self, self._dispatcher)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that opened the session; None before the constructor is called."""
        return None if self._dispatcher is None else self._dispatcher.loop

    @property
    def hangs_in(self) -> str:
        """The call that keeps a session from ending, for the log."""
        if self.close_began_at is not None:
            return "close()"
        kind = getattr(self._running, "kind", None)
        return "its constructor" if kind == "construct" else f"a call ({kind})"

    def close_began(self) -> None:
        """Record that the environment's `close` begins now."""
        self.close_began_at = self._clock()

    def make_way(self) -> None:
        """Let other sessions pass if their calls wait behind this session's `close`."""
        running = self._running
        if running is not None:
            self.lane.make_way(running)

    def abandon(self) -> bool:
        """Give up a closing session that hangs; return False if it has ended after all.

        If its code returns later, the environment is closed and the session ends normally.
        """
        with self._lock:
            if self.state is not _CLOSING:
                return False
            self.state = _ABANDONED
            running = self._running
        if running is not None:
            running.cancel(self)  # ends a `close` that is a coroutine
            self.lane.abandon(running)
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self.state = _CLOSED
            self._running = None
            refused, self._waiting = self._waiting, deque()  # calls that waited for a failed constructor
        env, self.env = self.env, None
        for waiting in refused:
            waiting.settle(self.closed_error())
        if error is not None:
            logger.error("session %s: close() of the environment failed", self.id, exc_info=author_exc_info(error))
        self.lane.release()
        self._on_closed(self)
        if self.on_dropped is not None and env is not None:
            self.on_dropped(env)


class _LanePart:
    """A blocking part of a coroutine, for the lane. It does not begin if the coroutine was cancelled."""

    __slots__ = ("_dispatcher", "_error", "_function", "_future", "_result", "kind")

    count = 1

    def __init__(
        self, function: Callable[[], Any], future: asyncio.Future[Any], dispatcher: Dispatcher, kind: str
    ) -> None:
        self.kind = kind
        self._function = function
        self._future = future
        self._dispatcher = dispatcher
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, in the lane."""
        if self._future.cancelled():
            return
        try:
            self._result = self._function()
        except BaseException as exc:
            self._error = exc
        self._dispatcher.hand_over(self)

    def deliver(self) -> None:
        """Hand the outcome over."""
        _settler(self._future)(self._result, self._error)


def _settler(future: asyncio.Future[Any]) -> Done:
    """Return a callback that sets a future to the outcome of a call, unless the waiter was cancelled."""

    def done(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_raisable(error))

    return done


def _raisable(error: BaseException) -> BaseException:
    """Wrap exceptions of an environment that a coroutine must not raise.

    A coroutine cannot raise `StopIteration`. `SystemExit` and `KeyboardInterrupt` would end the server. A
    `CancelledError` from the environment would look like a cancellation of the waiter.
    """
    if isinstance(error, StopIteration) or not isinstance(error, Exception):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def has_stepped(error: BaseException | None) -> bool:
    """Return whether a step with this outcome has changed the environment, so that it counts."""
    return error is None or isinstance(error, NonFiniteReward)


def error_hint(session: Session, kind: str) -> str:
    """Return a hint to append to the text of an exception from an operation of that kind."""
    return NEVER_RESET if kind == "step" and not session.was_reset else ""


def with_hint(shown: BaseException, session: Session, kind: str, *, has_place: bool = True) -> BaseException:
    """Add a hint and details to an environment's failure; leave errors of the framework unchanged.

    The details contain the exception's class and, if known in this process, the failing line. Set `has_place` to false
    for v1, which has no such keys.
    """
    return described_failure(shown, error_hint(session, kind), has_place=has_place)


def described_failure(shown: BaseException, hint: str, *, has_place: bool = True) -> BaseException:
    """Return an environment's failure with a hint and details; return errors of the framework unchanged."""
    if isinstance(shown, OpenEnvError):
        if not hint or not isinstance(shown, ExecutionError):
            return shown
        if isinstance(shown, NonFiniteReward):
            return shown
        details = shown.details
    else:
        place = author_place(shown) if has_place else None
        details = {"exception": type(shown).__name__} if has_place else {}
        if place is not None:
            details["place"] = place
    return ExecutionError(f"{message_of(shown)}{hint}", details=details)
