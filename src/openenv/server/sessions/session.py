"""`Session`: one environment, one life, one call at a time.

    CREATING ──┬──> READY <───── call ─────> BUSY
               │     │  ^                     ^
               │ detach attach                │
               │     v  │                     │
               └──> DETACHED <──── call ──────┘

    every state ── close ──> CLOSING ─────────────> CLOSED
                                │                     ^
                                └─ abandon ─> ABANDONED (its code ends after all, or never)

READY and DETACHED are idle. DETACHED exists for resumable sessions only: no connection holds the session, and its token
attaches it again. A session that is BUSY when its connection goes stays BUSY until its last call has ended. ABANDONED
holds no slot: its last call, or the environment's own `close`, hangs.
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
from openenv.errors import ExecutionError, OpenEnvError, RequestCancelled, SessionClosedError, message_of

from ..author_frames import author_exc_info, author_place
from ..runners import Dispatcher, Lane, current_dispatcher
from .events import EpisodeStats, RequestOrigin
from .ledger import Ledger
from .operations import CLOSE, CONSTRUCT, Operation, closes_at_once

logger = logging.getLogger(__name__)

Done = Callable[[Any, BaseException | None], None]
"""Takes the result of a call, or its error."""


class SessionState(str, Enum):
    """Where a session is in its life."""

    CREATING = "creating"
    READY = "ready"
    BUSY = "busy"
    DETACHED = "detached"
    CLOSING = "closing"
    ABANDONED = "abandoned"
    CLOSED = "closed"


# A member looked up in its class costs four times a global, and every step needs several.
_CREATING, _READY, _BUSY = SessionState.CREATING, SessionState.READY, SessionState.BUSY
_DETACHED, _CLOSING, _CLOSED = SessionState.DETACHED, SessionState.CLOSING, SessionState.CLOSED
_ABANDONED = SessionState.ABANDONED

_INTERRUPT_AGAIN_S: Final = 0.05
_NEVER_RESET: Final = " (reset() has not been called in this session yet)"


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
        """End the work for a session early, as far as that is possible."""
        ...


class SessionHolder(Protocol):
    """A connection that a session is attached to."""

    def let_go(self, session: Session, reason: str) -> None:
        """Forget the session: it has ended, or another connection has attached to it. Called from any thread."""
        ...

    def holds_back(self, session: Session) -> bool:
        """Say whether the session must not start its next call, since the client does not read replies.

        The holder then calls `continue_calls` when that has changed. Called from any thread, under the session's lock.
        """
        ...


class SessionCall:
    """One request to a session, and its outcome.

    It runs in the session's lane, or as a coroutine on the requester's loop where the environment overrides the async
    method. The outcome goes to `done` once, always on the requester's loop.
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

    def run(self) -> None:
        """Do the work, in the lane."""
        session = self._session
        try:
            self.result = self.operation.in_lane(session.env, self.argument)
        except BaseException as exc:  # `sys.exit` in an environment is its failure, and must not end the thread
            self.error = exc
        session._finished(self)

    async def _run_in_loop(self) -> None:
        session = self._session
        assert self.operation.in_loop is not None
        OFFLOAD.set(session.run_in_lane)  # in the context of this task: the coroutine's blocking parts go to the lane
        try:
            self.result = await self.operation.in_loop(session.env, self.argument)
        except asyncio.CancelledError:
            reason = session.close_reason
            self.error = RequestCancelled() if reason is None else SessionClosedError(session.id, reason)
        except BaseException as exc:
            self.error = exc
        session._finished(self)

    def launch(self) -> None:
        """Start the coroutine on the requester's loop, or elsewhere when that one has ended."""
        if self.kind == "close" and asyncio._get_running_loop() is not None:
            # The loop that opened the session may have ended, or may be blocked by the caller's (`LocalEnv.sync()`).
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
        if session.is_ending and self.kind != "close":  # closed before the coroutine could begin
            self.error = session.closed_error()
            session._finished(self)
            return
        self.task = self._dispatcher.loop.create_task(self._run_in_loop())

    def cancel(self, session: Session) -> None:
        """Interrupt a coroutine, or a tool in the lane; other code in a thread runs to its end."""
        if self.task is not None:
            self._dispatcher.loop.call_soon_threadsafe(self.task.cancel)
        else:
            interrupt(session, self, self.operation, self._dispatcher)

    def settle(self, error: BaseException | None = None) -> None:
        """Deliver the outcome, on the requester's loop."""
        if error is not None:
            self.error = error
        if self.error is not None and self.kind != "construct":  # the manager reports failed constructors itself
            self._session.report_error(self.error)
        self._dispatcher.hand_over(self)

    def deliver(self) -> None:
        """Hand the outcome over; called on the requester's loop."""
        self._done(self.result, self.error)


class ClosingCall(SessionCall):
    """The environment's own `close`, which comes last; nothing waits for its outcome."""

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
"""Makes a factory of calls that does more than another one, for a recording."""
ObserveStep = Callable[[float, float, float], None]
"""Takes the seconds that a step has waited, run, and been on its way back."""


def interrupt(session: Session, call: Cancellable, operation: Operation, dispatcher: Dispatcher) -> None:
    """Interrupt code in a session's lane, repeatedly until its call has ended: the tool may not have begun yet."""
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
        lane: Where its blocking code runs.
        clock: A steady clock.
        listener: Learns what happens to the session.
    """

    # CPython's instances of one class share the keys of their dictionaries up to 30 attributes only. Beyond that, each
    # attribute costs more to read and to keep, in every step (`benchmarks/instructions.py`).
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
        self.closing_at: float | None = None  # since when it is to end
        self.close_began_at: float | None = None  # since when the environment's own `close` runs
        self.holder: SessionHolder | None = None  # only `attach` and `detach` write it
        self.is_unclaimed = False  # a copy whose client has not attached to it yet
        self.client_left = False
        self.secret = ""
        self.ledger = Ledger()
        self.by_agent = False  # whether an agent has opened it, not an orchestrator
        self.episode = EpisodeStats()
        self.was_reset = False
        self.restored_from: Session | None = None  # while it is
        self.make_call: CallFactory = SessionCall
        self.calls_alone = False  # whether calls are watched one by one, so that steps cannot run in groups
        self.observe_step: ObserveStep | None = None
        self.on_dropped: Callable[[Any], None] | None = None  # takes the environment once it is closed
        self._clock = clock
        self._on_ready = listener.on_ready
        self._on_closed = listener.on_closed
        self._on_error = listener.on_error
        self._on_closing = listener.on_closing
        # The state without a call: one attribute instead of a decision at the end of every step.
        self._idle_state = _DETACHED if kind is SessionKind.RESUMABLE else _READY
        self._close_after_detach: str | None = None
        self._dispatcher: Dispatcher | None = None  # of the loop that opened the session
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
        """Whether no call runs or waits."""
        return self.state is _READY or self.state is _DETACHED

    @property
    def is_attached(self) -> bool:
        """Whether a connection holds the session; a socket's own session is attached to it for life."""
        return self.holder is not None or self.kind is SessionKind.SOCKET

    @property
    def is_detached(self) -> bool:
        """Whether a resumable session has lost its connection; true while its last call still runs, too."""
        return self.state is _DETACHED or (self.state is _BUSY and self._idle_state is _DETACHED)

    @property
    def unused_s(self) -> float:
        """Seconds since the session was last used."""
        return self._clock() - self.last_activity_at

    def touch(self) -> None:
        """Record that the session is in use."""
        with self._lock:
            self.last_activity_at = self._clock()

    def report_error(self, error: BaseException) -> None:
        """Report that a request of this session failed."""
        if self._on_error is not None:
            self._on_error(self, error)

    def closed_error(self) -> SessionClosedError:
        """Return the error for requests that come after the end."""
        return SessionClosedError(self.id, self.close_reason or "closed")

    # -- connections ----------------------------------------------------------------------------------------------

    def attach(self, holder: SessionHolder) -> SessionHolder | None:
        """Make a connection the session's holder; return the one that it takes the session from."""
        with self._lock:
            former, self.holder = self.holder, holder
            self.is_unclaimed = False
            self.last_activity_at = self._clock()
            self._idle_state = _READY  # a session that is busy now gets there with the end of its call
            if self.state is _DETACHED:
                self.state = _READY
        self.continue_calls()  # the former connection may have held them back
        return None if former is holder else former

    def detach(self, holder: SessionHolder, *, client_left: bool = False) -> bool:
        """End a connection's hold on the session; return False where another connection holds it by now.

        Args:
            holder: The connection.
            client_left: Whether the session's client has most likely left with it, which shortens the lease.
        """
        with self._lock:
            if self.holder is not holder:
                return False
            self.holder = None
            self.last_activity_at = self._clock()  # the grace period begins, or begins again with the end of a call
            self.client_left = self.client_left or client_left
            if self.kind is SessionKind.RESUMABLE:
                self._idle_state = _DETACHED
                if self.state is _READY:
                    self.state = _DETACHED
            reason = self._close_after_detach
        if reason is not None:
            self.close(reason)
        else:
            self.continue_calls()  # replies are kept for a client that comes back
        return True

    def close_when_detached(self, reason: str) -> bool:
        """Close the session now, or as soon as its connection detaches; return whether it was now."""
        with self._lock:
            if self.is_attached:
                self._close_after_detach = reason
                return False
        self.close(reason)
        return True

    # -- calls ----------------------------------------------------------------------------------------------------

    def construct(self, factory: Callable[[], Any], done: Done, dispatcher: Dispatcher) -> None:
        """Build the environment in the lane; comes first and only once."""
        call = self.make_call(self, CONSTRUCT, factory, done, dispatcher, None)
        self._dispatcher = dispatcher
        self._running = call
        self.lane.submit(call)

    def submit(
        self,
        operation: Operation,
        argument: Any,
        done: Done,
        dispatcher: Dispatcher,
        origin: RequestOrigin | None = None,
    ) -> SessionCall:
        """Run an operation after those before it; `done(result, error)` is called once, on the dispatcher's loop."""
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
        # Not under the lock: the inline runner runs the call here and now, and its end takes the lock again.
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
            if call.kind == "close" and not closes_at_once(self.env):
                self.lane.submit_close(call)
            else:
                self.lane.submit(call)
        else:
            call.launch()

    def make_calls_with(self, factory: CallFactory, observe_step: ObserveStep | None) -> None:
        """Make calls in another way from now on, for telemetry."""
        self._base_factory, self.observe_step = factory, observe_step
        self.calls_alone = factory is not SessionCall and observe_step is None
        self.make_call = factory if self._wrap_factory is None else self._wrap_factory(factory)

    def wrap_calls(self, wrap: WrapFactory | None) -> None:
        """Have calls made by what `wrap` makes of the factory, from now on; None ends that."""
        self._wrap_factory = wrap
        self.make_call = self._base_factory if wrap is None else wrap(self._base_factory)

    def begin_step(self, group: Cancellable, operation: Operation, action: Any) -> bool:
        """Reserve the session for a step of a group; return False where the step has to be a call of its own.

        That is so if its code does not block, if calls are watched one by one, or if the session is busy or ending.
        """
        if self.calls_alone:
            return False
        if self._steps_in_loop and not (operation.prefers_lane and operation.prefers_lane(self.env, action)):
            return False
        with self._lock:
            if self.state is not _READY:  # not DETACHED either: a batch comes on the connection that holds the session
                return False
            self.state = _BUSY
            self._running = group
        return True

    def end_step(self, *, failed: bool) -> SessionCall | None:
        """Release the session after a step of a group, in its lane; return the call to start next."""
        with self._lock:
            self.last_activity_at = self._clock()
            if not failed:
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
        origin: RequestOrigin | None = None,
    ) -> Any:
        """Run an operation and wait for its result.

        Args:
            operation: What to run.
            argument: The operation's argument.
            cancellable: Whether cancelling the wait cancels the operation too; otherwise it runs to its end.
            origin: Where the request comes from, for logs and traces.
        """
        dispatcher = current_dispatcher()
        future: asyncio.Future[Any] = dispatcher.loop.create_future()
        call = self.submit(operation, argument, _settler(future), dispatcher, origin)
        try:
            return await future
        except asyncio.CancelledError:
            if cancellable:
                self.cancel(call)
            raise

    async def run_in_lane(self, function: Callable[[], Any], *, kind: str = "step") -> Any:
        """Run a blocking part of the running call where all blocking code of the session runs."""
        dispatcher = current_dispatcher()
        future: asyncio.Future[Any] = dispatcher.loop.create_future()
        self.lane.submit(_LanePart(function, future, dispatcher, kind))
        return await future

    def continue_episode(self, other: Session) -> None:
        """Record that the environment is a copy of another session's, in the midst of its episode."""
        self.episode = replace(other.episode)
        self.was_reset = other.was_reset

    def exchange_environments(self, other: Session) -> bool:
        """Exchange environments, and the lanes that they run in, with a session that runs no call.

        Called during a call of this session; returns False where one of them is ending, and nothing was exchanged.
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
        """Remove a call that waits, or interrupt the one that runs; return False where it has ended."""
        with self._lock:
            is_running = self._running is call
            waiting = next((one for one in self._waiting if one is call), None)
            if waiting is not None:
                self._waiting.remove(waiting)
        if waiting is not None:  # it has not begun, so that its request can be answered at once
            waiting.settle(RequestCancelled())
        if is_running:
            call.cancel(self)
        return is_running or waiting is not None

    def _finished(self, call: SessionCall) -> None:
        """Record a finished call and start the next; called in the lane or on the loop, wherever the call ran."""
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
                if call.error is None:
                    self.step_count += 1
            elif kind == "reset":
                self.episode = EpisodeStats()
                self.was_reset = True
            if self.state is _BUSY and not self._waiting:  # the common case, without another call
                self.state = self._idle_state
                self._running = following = None
            else:
                following = self._next_call()
        call.settle()
        if following is not None:
            self.start(following)

    def _next_call(self) -> SessionCall | None:
        """Choose what runs next; the caller holds the lock."""
        following: SessionCall | None = None
        if self.state is not _BUSY and self.is_ending:  # the first is enough at the end of every step
            following = self._closing_call() if self.env is not None else None
        elif self._waiting:
            self.state = _BUSY
            if self.holder is None or not self.holder.holds_back(self):
                following = self._waiting.popleft()
        else:
            self.state = self._idle_state
        self._running = following
        return following

    def continue_calls(self) -> None:
        """Start the next call, if it was held back; may be called at any time."""
        with self._lock:
            if self.state is not _BUSY or self._running is not None:
                return
            following = self._next_call()
        if following is not None:
            self.start(following)

    def _constructed(self, call: SessionCall) -> None:
        """Record that the environment is built, or could not be."""
        if call.error is None:
            self.env = call.result
            try:
                self._async_kinds = bind_instance(self.env).async_kinds | {"tool", "fork", "restore"}
                self._steps_in_loop = "step" in self._async_kinds
            except Exception as exc:
                call.error = exc
            call.result = self
        error = call.error
        self._on_ready(self, error)  # before the state changes: other sessions wait for what the first one reveals
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
        self.lane.ending()  # before the environment's own `close`, which may hang
        if not is_built:  # its client left before the constructor was called
            self._end(None)
        if running is not None:  # `_next_call` closes the environment when it has ended
            running.cancel(self)
        if closing is not None:
            self.start(closing)
        if self._on_closing is not None and ends_soon and self.state is _CLOSING:  # its thread may be busy with another
            self._on_closing(self)

    def _closing_call(self) -> SessionCall:
        assert self._dispatcher is not None
        return ClosingCall(self, self._dispatcher)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that opened the session; None before its constructor was called."""
        return None if self._dispatcher is None else self._dispatcher.loop

    @property
    def hangs_in(self) -> str:
        """What a session that does not end is busy with, for the log."""
        if self.close_began_at is not None:
            return "close()"
        kind = getattr(self._running, "kind", None)
        return "its constructor" if kind == "construct" else f"a call ({kind})"

    def close_began(self) -> None:
        """Record that the environment's own `close` runs now."""
        self.close_began_at = self._clock()

    def make_way(self) -> None:
        """Let other sessions pass, where their calls wait behind this one's `close`."""
        running = self._running
        if running is not None:
            self.lane.make_way(running)

    def abandon(self) -> bool:
        """Give up a session whose last call, or whose `close`, hangs; return False where it has ended after all.

        Should its code return one day, the environment is closed and the session ends as any other.
        """
        with self._lock:
            if self.state is not _CLOSING:
                return False
            self.state = _ABANDONED
            running = self._running
        if running is not None:
            running.cancel(self)  # a `close` that is a coroutine can be ended
            self.lane.abandon(running)
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self.state = _CLOSED
            self._running = None
            refused, self._waiting = self._waiting, deque()  # calls that waited for a constructor that has failed
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
    """A blocking part of a coroutine's work, for the lane. It does not begin when its coroutine is cancelled before."""

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
    """Return what sets a future to the outcome of a call, unless its waiter was cancelled."""

    def done(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_raisable(error))

    return done


def _raisable(error: BaseException) -> BaseException:
    """Wrap what a coroutine must not raise for an environment.

    `StopIteration` cannot be raised by a coroutine. `SystemExit` and `KeyboardInterrupt` would end the server. A
    `CancelledError` of the environment would look like a cancellation of the waiter.
    """
    if isinstance(error, StopIteration) or not isinstance(error, Exception):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def error_hint(session: Session, kind: str) -> str:
    """Return what to append to the text of an exception that an operation of that kind has raised."""
    return _NEVER_RESET if kind == "step" and not session.was_reset else ""


def with_hint(shown: BaseException, session: Session, kind: str, *, has_place: bool = True) -> BaseException:
    """Return an environment's failure with a hint at its cause; errors of the framework itself stay as they are.

    The details have the exception's class and, where this process knows it, the line of the author's code, unless
    `has_place` is false: v1 knows no such keys.
    """
    text = error_hint(session, kind)
    if isinstance(shown, OpenEnvError):
        if not text or not isinstance(shown, ExecutionError):
            return shown
        details = shown.details
    else:
        place = author_place(shown) if has_place else None
        details = {"exception": type(shown).__name__} if has_place else {}
        if place is not None:
            details["place"] = place
    return ExecutionError(f"{message_of(shown)}{text}", details=details)
