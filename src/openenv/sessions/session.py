"""`Session`: one environment, one life, one call at a time.

    CREATING ──> READY <──> BUSY
        │          │          │
        └──────────┴──> CLOSING ──> CLOSED

All environment code, constructor and `close` included, runs in the session's lane (coroutines on the caller's loop).
Every request is answered exactly once. Knows lanes and operations; must not know the wire or how many sessions exist.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from ..env.binding import OFFLOAD, bind
from ..errors import ExecutionError, OpenEnvError, RequestCancelled, SessionClosedError, message_of
from ..runners import Dispatcher, Lane, RemoteLane, current_dispatcher
from .events import EpisodeStats, RequestOrigin
from .ledger import Ledger
from .operations import CLOSE, CONSTRUCT, Operation

# A piece of a coroutine's work that runs in its session's lane. Knows hubs and futures; must not know sessions.


class LanePart:
    """A piece of a coroutine's work that runs in the lane. If nobody waits any more, it is not begun."""

    __slots__ = ("_error", "_function", "_future", "_hub", "_result", "kind")

    count = 1

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any], hub: Dispatcher) -> None:
        self.kind = "step"
        self._function = function
        self._future = future
        self._hub = hub
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
        if self._hub.is_at_hand:
            self.deliver()
        else:
            self._hub.post(self)

    def deliver(self) -> None:
        """Hand the outcome over."""
        if self._future.done():
            return
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(raisable(self._error))


def raisable(error: BaseException) -> BaseException:
    """A coroutine may not raise StopIteration, and an exit asked for by an environment is not ours to carry out.

    Nor is a cancellation that it raises one of whoever waits, who would leave without a word to those who ask again.
    """
    if isinstance(error, StopIteration) or not isinstance(error, Exception):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# account: Whom a session counts for.


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a session counts for.

    Args:
        key: A name of the client's choosing.
        is_agent: Whether an agent has opened it.
    """

    key: str | None = None
    is_agent: bool = False


logger = logging.getLogger(__name__)

Done = Callable[[Any, BaseException | None], None]


class SessionState(str, Enum):
    """Where a session is in its life."""

    CREATING = "creating"
    READY = "ready"
    BUSY = "busy"
    CLOSING = "closing"
    CLOSED = "closed"


# A member looked up in its class costs four times a global; every step asks several times.
_READY, _BUSY, _CREATING, _CLOSING = (
    SessionState.READY,
    SessionState.BUSY,
    SessionState.CREATING,
    SessionState.CLOSING,
)


_INTERRUPT_AGAIN_S = 0.05


class SessionKind(str, Enum):
    """Who keeps a session alive: a socket, an HTTP client, a cookie, a single request, or whoever has its token."""

    SOCKET = "socket"
    HTTP = "http"
    SOFT = "soft"
    ONCE = "once"
    RESUMABLE = "resumable"


class SessionCall:
    """One request to a session and its outcome."""

    __slots__ = ("_done", "_hub", "_session", "argument", "error", "kind", "operation", "origin", "result", "task")

    count = 1

    def __init__(
        self,
        session: Session,
        operation: Operation,
        argument: Any,
        done: Done,
        hub: Dispatcher,
        origin: RequestOrigin | None = None,
    ) -> None:
        self._session = session
        self.operation = operation
        self.kind: str = operation.kind
        self.argument = argument
        self._done = done
        self._hub = hub
        self.origin = origin
        self.result: Any = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Do the work, in the lane."""
        session = self._session
        try:
            self.result = self.operation.in_lane(session.env, self.argument)
        except BaseException as exc:
            self.error = exc
        session._finished(self)

    async def _run_in_loop(self) -> None:
        session = self._session
        assert self.operation.in_loop is not None
        OFFLOAD.set(session.run_in_lane)
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
            self._hub = current_dispatcher()  # the loop of its first days may have ended, or stand still under this one
        if self._hub.is_current:
            self._start_task()
        elif self._hub.loop.is_running():
            self._hub.loop.call_soon_threadsafe(self._start_task)
        else:
            asyncio.run(self._run_in_loop())

    def _start_task(self) -> None:
        session = self._session
        if session.state is SessionState.CLOSING and self.kind != "close":  # closed before it could begin
            self.error = SessionClosedError(session.id, session.close_reason or "closed")
            session._finished(self)
            return
        self.task = self._hub.loop.create_task(self._run_in_loop())

    def cancel(self, session: Session) -> None:
        """Interrupt a coroutine, or a tool in the lane; other code that runs in a thread is waited for."""
        if self.task is not None:
            task = self.task
            self._hub.loop.call_soon_threadsafe(task.cancel)
        else:
            interrupt(session, self, self.operation, self._hub)

    def settle(self, error: BaseException | None = None) -> None:
        """Tell the requester, on its own loop."""
        if error is not None:
            self.error = error
        if self.error is not None and self.kind != "construct":  # of that, whoever opens the session is told more
            self._session.report_error(self.error)
        if self._hub.is_at_hand:
            self.deliver()
        else:
            self._hub.post(self)

    def deliver(self) -> None:
        """Hand the outcome over."""
        self._done(self.result, self.error)


CallFactory = Callable[["Session", Operation, Any, Done, Dispatcher, "RequestOrigin | None"], SessionCall]
ObserveStep = Callable[[float, float, float], None]
"""Takes the seconds that a step has waited, run, and been on its way back."""


class Cancellable(Protocol):
    """What a session is busy with."""

    def cancel(self, session: Session) -> None:
        """End what it does for a session early, as far as that is possible."""
        ...


def interrupt(session: Session, call: Cancellable, operation: Operation, hub: Dispatcher) -> None:
    """Interrupt code in a session's lane until its call has ended: it may have been about to begin."""
    if session._running is not call or operation.interrupt is None:
        return
    operation.interrupt(session.env)
    if hub.loop.is_running():
        again = (interrupt, session, call, operation, hub)
        hub.loop.call_soon_threadsafe(hub.loop.call_later, _INTERRUPT_AGAIN_S, *again)


class SessionHolder(Protocol):
    """Whoever a resumable session is attached to."""

    def let_go(self, session: Session, reason: str) -> None:
        """The session is no longer yours: somebody else has attached to it, or it has ended."""
        ...


class Session:
    """One environment and the calls waiting for it. Methods may be called from any thread."""

    def __init__(
        self,
        session_id: str,
        kind: SessionKind,
        *,
        lane: Lane,
        clock: Callable[[], float],
        on_ready: Callable[[Session, BaseException | None], None],
        on_closed: Callable[[Session], None],
        on_error: Callable[[Session, BaseException], None] | None = None,
    ) -> None:
        self.id = session_id
        self.kind = kind
        self.state = SessionState.CREATING
        self.env: Any = None
        self.lane = lane
        self.created_at = self.last_activity_at = clock()
        self.step_count = 0
        self.close_reason: str | None = None
        self.is_attached = kind is SessionKind.SOCKET
        self.was_attached = False
        self.holder: SessionHolder | None = None
        self.secret = ""
        self.ledger = Ledger()
        self.account = Account()
        self.close_when_detached = False
        self.episode = EpisodeStats()
        self.was_reset = False
        self._clock = clock
        self._on_ready = on_ready
        self._on_closed = on_closed
        self._on_error = on_error
        self.make_call: CallFactory = SessionCall
        self.observe_step: ObserveStep | None = None
        self._home: Dispatcher | None = None
        self._running: Cancellable | None = None
        self._waiting: deque[SessionCall] = deque()
        self._async_kinds: frozenset[str] = frozenset()
        self._steps_in_loop = False
        self._lock = threading.Lock()

    def construct(self, factory: Callable[[], Any], done: Done, hub: Dispatcher) -> None:
        """Build the environment in the lane; comes first and only once."""
        call = self.make_call(self, CONSTRUCT, factory, done, hub, None)
        self._home = hub
        self._running = call
        self.lane.submit(call)

    def report_error(self, error: BaseException) -> None:
        """Tell that a request of this session failed."""
        if self._on_error is not None:
            self._on_error(self, error)

    def touch(self) -> None:
        """Note that somebody uses the session."""
        with self._lock:
            self.last_activity_at = self._clock()

    @property
    def unused_s(self) -> float:
        """Seconds since somebody has used the session."""
        return self._clock() - self.last_activity_at

    def submit(
        self, operation: Operation, argument: Any, done: Done, hub: Dispatcher, origin: RequestOrigin | None = None
    ) -> SessionCall:
        """Run an operation after those before it; `done(result, error)` is called once, on the hub's loop."""
        call = self.make_call(self, operation, argument, done, hub, origin)
        with self._lock:
            state = self.state
            if state is _READY:
                self.state = _BUSY
                self._running = call
                self.last_activity_at = self._clock()
            elif state is _BUSY or state is _CREATING:
                self._waiting.append(call)
                return call
        if state is _READY:
            self.start(call)
        else:
            call.settle(SessionClosedError(self.id, self.close_reason or "closed"))
        return call

    def begin_step(self, group: Cancellable, operation: Operation, action: Any) -> bool:
        """Take the session for a step of a group, unless that must run by itself.

        It must if it does not block, if calls are watched one by one, or if the session is busy or ending.
        """
        if self.make_call is not SessionCall and self.observe_step is None:
            return False
        if self._steps_in_loop and not (operation.prefers_lane and operation.prefers_lane(self.env, action)):
            return False
        with self._lock:
            if self.state is not _READY:
                return False
            self.state = _BUSY
            self._running = group
        return True

    def end_step(self, *, failed: bool) -> SessionCall | None:
        """Let the session go, in its lane; return what has to be started next."""
        with self._lock:
            self.last_activity_at = self._clock()
            if not failed:
                self.step_count += 1
            if self.state is _BUSY and not self._waiting:
                self.state = _READY
                self._running = None
                return None
            return self._following()

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
            cancellable: Whether cancelling the wait cancels the operation too; otherwise it runs to its end.
            origin: Where the request comes from, for logs and traces.
        """
        hub = current_dispatcher()
        future: asyncio.Future[Any] = hub.loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.done():
                return  # the requester was cancelled; the call has run to its end all the same
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(raisable(error))

        call = self.submit(operation, argument, done, hub, origin)
        try:
            return await future
        except asyncio.CancelledError:
            if cancellable:
                self.cancel(call)
            raise

    def cancel(self, call: Cancellable) -> bool:
        """Take back a call that waits, or interrupt the one that runs; say whether it was still there."""
        with self._lock:
            running = self._running is call
            waiting = next((one for one in self._waiting if one is call), None)
            if waiting is not None:
                self._waiting.remove(waiting)
        if waiting is not None:
            waiting.settle(RequestCancelled())
        if running:
            call.cancel(self)
        return running or waiting is not None

    async def run_in_lane(self, function: Callable[[], Any]) -> Any:
        """Run a blocking part of the running call where all blocking code of the session runs."""
        hub = current_dispatcher()
        future: asyncio.Future[Any] = hub.loop.create_future()
        self.lane.submit(LanePart(function, future, hub))
        return await future

    def close(self, reason: str = "closed") -> None:
        """End the session: refuse what waits, interrupt what can be, then close the environment in its lane."""
        with self._lock:
            if self.is_ending:
                return
            self.state = SessionState.CLOSING
            self.close_reason = reason
            refused, self._waiting = self._waiting, deque()
            running = self._running
            unbuilt = self._home is None
            closing = None
            if running is None and not unbuilt:
                closing = self._running = self._closing_call()
        for call in refused:
            call.settle(SessionClosedError(self.id, reason))
        if isinstance(self.lane, RemoteLane):
            self.lane.ending()
        if unbuilt:  # its client left before the constructor was called
            self._end(None)
        if running is not None:
            running.cancel(self)
        if closing is not None:
            self.start(closing)

    @property
    def is_ending(self) -> bool:
        """Whether it is being closed, or is closed."""
        return self.state in (SessionState.CLOSING, SessionState.CLOSED)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.state is SessionState.READY

    def _closing_call(self) -> SessionCall:
        assert self._home is not None
        return SessionCall(self, CLOSE, None, _nobody_waits, self._home)

    def start(self, call: SessionCall) -> None:
        """Run a call that the session has been taken for."""
        operation = call.operation
        if (
            operation.in_loop is None
            or call.kind not in self._async_kinds
            or (operation.prefers_lane is not None and operation.prefers_lane(self.env, call.argument))
        ):
            self.lane.submit(call)
        else:
            call.launch()

    def _finished(self, call: SessionCall) -> None:
        """Take note of a finished call and start the next; called wherever the call ran."""
        kind = call.kind
        if kind == "close":
            self._end(call)
            return
        if kind == "construct":
            self._finished_first(call)
            return
        with self._lock:
            self.last_activity_at = self._clock()
            if kind == "step" and call.error is None:
                self.step_count += 1
            elif kind == "reset":
                self.episode = EpisodeStats()
                self.was_reset = True
            following = self._following()
        call.settle()
        if following is not None:
            self.start(following)

    def _following(self) -> SessionCall | None:
        """Choose what runs next; the caller holds the lock."""
        following: SessionCall | None = None
        if self.state is _CLOSING:
            following = self._closing_call() if self.env is not None else None
        elif self._waiting:
            self.state = _BUSY
            following = self._waiting.popleft()
        else:
            self.state = _READY
        self._running = following
        return following

    def _finished_first(self, call: SessionCall) -> None:
        """The environment is built, or could not be."""
        if call.error is None:
            self.env = call.result
            try:
                self._async_kinds = bind(type(self.env)).async_kinds | {"tool"}
                self._steps_in_loop = "step" in self._async_kinds
            except Exception as exc:
                call.error = exc
            call.result = self
        error = call.error
        self._on_ready(self, error)  # while it still counts as being created: others wait for what this one tells
        with self._lock:
            self.last_activity_at = self._clock()
            if error is not None:
                self.state = SessionState.CLOSING
                self.close_reason = self.close_reason or "factory failed"
            following = self._following()
        call.settle()
        if following is not None:
            self.start(following)
        elif error is not None:
            self._end(None)

    def _end(self, call: SessionCall | None) -> None:
        with self._lock:
            self.state = SessionState.CLOSED
            self._running = None
            refused, self._waiting = self._waiting, deque()
        self.env = None
        for waiting in refused:
            waiting.settle(SessionClosedError(self.id, self.close_reason or "closed"))
        if call is not None and call.error is not None:
            logger.error("session %s: close() of the environment failed", self.id, exc_info=call.error)
        self.lane.release()
        self._on_closed(self)


def _nobody_waits(_: Any, error: BaseException | None) -> None:
    """The outcome of `close` is logged where it happens."""


# hints: What is added to an environment's own exception where its session tells more about the cause.
#
# Knows sessions and exceptions; must not know how a failure is sent.


_NEVER_RESET: Final = " (reset() has not been called in this session yet)"


def error_hint(session: Session, kind: str) -> str:
    """Return what to append to the text of an exception that an operation of that kind has raised."""
    return _NEVER_RESET if kind == "step" and not session.was_reset else ""


def with_hint(shown: BaseException, session: Session, kind: str) -> BaseException:
    """Return a failure as clients may see it, with a hint; what the framework itself raises stays as it is."""
    text = error_hint(session, kind)
    if not text or (isinstance(shown, OpenEnvError) and not isinstance(shown, ExecutionError)):
        return shown
    details = shown.details if isinstance(shown, OpenEnvError) else None
    return ExecutionError(f"{message_of(shown)}{text}", details=details)
