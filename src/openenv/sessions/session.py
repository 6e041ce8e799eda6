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
from enum import Enum
from typing import Any

from ..env.binding import bind
from ..errors import SessionClosedError
from ..runners import Hub, Lane, current_hub
from .operations import CLOSE, CONSTRUCT, Operation

logger = logging.getLogger(__name__)

Done = Callable[[Any, BaseException | None], None]


class SessionState(str, Enum):
    """Where a session is in its life."""

    CREATING = "creating"
    READY = "ready"
    BUSY = "busy"
    CLOSING = "closing"
    CLOSED = "closed"


class SessionKind(str, Enum):
    """Who keeps a session alive: a socket, an explicit HTTP client, a cookie, or a single request."""

    SOCKET = "socket"
    HTTP = "http"
    SOFT = "soft"
    ONCE = "once"


class Call:
    """One request to a session and its outcome."""

    __slots__ = ("_done", "_hub", "_session", "argument", "error", "kind", "operation", "result", "task")

    def __init__(self, session: Session, operation: Operation, argument: Any, done: Done, hub: Hub) -> None:
        self._session = session
        self.operation = operation
        self.kind: str = operation.kind
        self.argument = argument
        self._done = done
        self._hub = hub
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
        try:
            self.result = await self.operation.in_loop(session.env, self.argument)
        except asyncio.CancelledError:
            self.error = SessionClosedError(session.id, session.close_reason or "cancelled")
        except BaseException as exc:
            self.error = exc
        session._finished(self)

    def launch(self) -> None:
        """Start the coroutine on the requester's loop, or elsewhere when that one has ended."""
        if self.kind == "close" and asyncio._get_running_loop() is not None:
            self._hub = current_hub()  # the loop of its first days may have ended, or stand still under this one
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

    def cancel(self) -> None:
        """Interrupt a coroutine; code that runs in a thread cannot be interrupted and is waited for."""
        if self.task is not None:
            task = self.task
            self._hub.loop.call_soon_threadsafe(task.cancel)

    def settle(self, error: BaseException | None = None) -> None:
        """Tell the requester, on its own loop."""
        if error is not None:
            self.error = error
        if self._hub.is_current:
            self.deliver()
        else:
            self._hub.post(self)

    def deliver(self) -> None:
        """Hand the outcome over."""
        self._done(self.result, self.error)


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
        self._clock = clock
        self._on_ready = on_ready
        self._on_closed = on_closed
        self._home: Hub | None = None
        self._running: Call | None = None
        self._waiting: deque[Call] = deque()
        self._async_kinds: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def construct(self, factory: Callable[[], Any], done: Done, hub: Hub) -> None:
        """Build the environment in the lane; comes first and only once."""
        call = Call(self, CONSTRUCT, factory, done, hub)
        self._home = hub
        self._running = call
        self.lane.submit(call)

    def touch(self) -> None:
        """Note that somebody uses the session."""
        with self._lock:
            self.last_activity_at = self._clock()

    def submit(self, operation: Operation, argument: Any, done: Done, hub: Hub) -> None:
        """Run an operation after those before it; `done(result, error)` is called once, on the hub's loop."""
        call = Call(self, operation, argument, done, hub)
        with self._lock:
            if self.state is SessionState.READY:
                self.state = SessionState.BUSY
                self._running = call
                self.last_activity_at = self._clock()
            elif self.state in (SessionState.BUSY, SessionState.CREATING):
                self._waiting.append(call)
                return
            else:
                call.error = SessionClosedError(self.id, self.close_reason or "closed")
        if call.error is not None:
            call.settle()
        else:
            self._start(call)

    async def run(self, operation: Operation, argument: Any = None) -> Any:
        """Run an operation and wait for its result."""
        hub = current_hub()
        future: asyncio.Future[Any] = hub.loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.done():
                return  # the requester was cancelled; the call has run to its end all the same
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(_raisable(error))

        self.submit(operation, argument, done, hub)
        return await future

    def close(self, reason: str = "closed") -> None:
        """End the session: refuse what waits, interrupt what can be, then close the environment in its lane."""
        with self._lock:
            if self.state in (SessionState.CLOSING, SessionState.CLOSED):
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
        if unbuilt:  # its client left before the constructor was called
            self._end(None)
        if running is not None:
            running.cancel()
        if closing is not None:
            self._start(closing)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.state is SessionState.READY

    def _closing_call(self) -> Call:
        assert self._home is not None
        return Call(self, CLOSE, None, _nobody_waits, self._home)

    def _start(self, call: Call) -> None:
        if call.kind in self._async_kinds and call.operation.in_loop is not None:
            call.launch()
        else:
            self.lane.submit(call)

    def _finished(self, call: Call) -> None:
        """Take note of a finished call and start the next; called wherever the call ran."""
        if call.kind == "close":
            self._end(call)
            return
        if call.kind == "construct":
            self._finished_first(call)
            return
        with self._lock:
            self.last_activity_at = self._clock()
            if call.kind == "step" and call.error is None:
                self.step_count += 1
            following = self._following()
        call.settle()
        if following is not None:
            self._start(following)

    def _following(self) -> Call | None:
        """Choose what runs next; the caller holds the lock."""
        following: Call | None = None
        if self.state is SessionState.CLOSING:
            following = self._closing_call() if self.env is not None else None
        elif self._waiting:
            self.state = SessionState.BUSY
            following = self._waiting.popleft()
        else:
            self.state = SessionState.READY
        self._running = following
        return following

    def _finished_first(self, call: Call) -> None:
        """The environment is built, or could not be."""
        if call.error is None:
            self.env = call.result
            try:
                self._async_kinds = bind(type(self.env)).async_kinds
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
            self._start(following)
        elif error is not None:
            self._end(None)

    def _end(self, call: Call | None) -> None:
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


def _raisable(error: BaseException) -> BaseException:
    """A coroutine may not raise StopIteration, and an exit asked for by an environment is not ours to carry out."""
    if isinstance(error, (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit)):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
