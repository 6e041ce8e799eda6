"""Watched calls: their times, the current call for logs, and OpenTelemetry spans.

Sessions build their calls with a factory, by default the plain class. Only `CallWatch` replaces it, so a server without
metrics, JSON logs or tracing pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any

from openenv.errors import OpenEnvError

from ..runners import Dispatcher
from ..sessions.events import RequestOrigin
from ..sessions.manager import SessionManager
from ..sessions.operations import Operation
from ..sessions.session import Done, Session, SessionCall
from .prometheus import Histograms

Surrounding = Callable[["WatchedCall"], AbstractContextManager[None]]
PHASES = ("wait", "run", "reply")
_API = "opentelemetry.trace"
CURRENT: ContextVar[WatchedCall | None] = ContextVar("openenv_call", default=None)


class CallWatch:
    """Times, names or surrounds the calls of a manager's sessions, once one of its methods asks for it."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._is_on = False
        self.times = _Times()
        self.names_calls = False
        self.surroundings: tuple[Surrounding, ...] = ()

    def begin(self) -> None:
        """Time each call from now on, in a histogram for each phase, by kind of call."""
        if not self._is_on:
            self._is_on = True
            self._manager.make_calls_with(self._make_call, observe_step=self._observe_step)

    def _make_call(
        self,
        session: Session,
        operation: Operation,
        argument: Any,
        done: Done,
        dispatcher: Dispatcher,
        origin: RequestOrigin | None = None,
    ) -> WatchedCall:
        """Make a watched call; a `CallFactory`."""
        call = WatchedCall(session, operation, argument, done, dispatcher, origin)
        call._watch = self
        call._inside = None
        call.began = 0.0
        call.submitted = perf_counter()
        return call

    def _observe_step(self, wait_s: float, run_s: float, reply_s: float) -> None:
        self.times["step"].observe(wait_s, run_s, reply_s)

    def name_calls(self) -> None:
        """Set `CURRENT` to the call that runs or is being answered, from now on."""
        self.names_calls = self._is_on = True
        self._manager.make_calls_with(self._make_call, with_origins=True)

    def surround(self, surrounding: Surrounding) -> None:
        """Run each call inside a context manager, from now on."""
        self.surroundings += (surrounding,)
        self.name_calls()


class _Times(dict[str, Histograms]):
    """The times of calls, by kind; a new kind gets its histograms at first use."""

    def __missing__(self, kind: str) -> Histograms:
        return self.setdefault(kind, Histograms(len(PHASES)))


class WatchedCall(SessionCall):
    """A call that records its times.

    It calls the plain methods by name: `super()` would cost more than they do.
    """

    __slots__ = ("_inside", "_watch", "began", "ended", "submitted")

    _watch: CallWatch
    _inside: ExitStack | None
    began: float
    ended: float
    submitted: float

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self._session.id

    def run(self) -> None:
        """Run the operation, in the lane."""
        self.began = perf_counter()
        if self._watch.names_calls:
            self._enter()
        SessionCall.run(self)

    async def _run_in_loop(self) -> None:
        self.began = perf_counter()
        if self._watch.names_calls:
            self._enter()
        await SessionCall._run_in_loop(self)

    def _enter(self) -> None:
        self._inside = stack = ExitStack()
        stack.callback(CURRENT.reset, CURRENT.set(self))
        for surrounding in self._watch.surroundings:
            stack.enter_context(surrounding(self))

    def settle(self, error: BaseException | None = None) -> None:
        """Deliver the result, on the requester's loop."""
        self.ended = perf_counter()
        if self._inside is not None:
            # Leave the context first: replies of other calls may be sent from the context of this one.
            inside, self._inside = self._inside, None
            inside.close()
        SessionCall.settle(self, error)

    def deliver(self) -> None:
        """Give the result to the requester."""
        if self._watch.names_calls:
            token = CURRENT.set(self)
            try:
                self._done(self.result, self.error)
            finally:
                CURRENT.reset(token)
        else:
            self._done(self.result, self.error)
        began, ended = self.began, self.ended
        if began:  # else it was refused before it ran
            self._watch.times[self.kind].observe(began - self.submitted, ended - began, perf_counter() - ended)


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


def trace_if_set_up(watch: CallWatch) -> bool:
    """Trace each call from now on if the application has set up OpenTelemetry; say whether it has.

    Looks for a tracer provider among the loaded modules: without one, nothing is imported.
    """
    api = sys.modules.get(_API)
    if api is None:
        return False
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return False
    watch.surround(Tracer(provider).traced)
    return True


class Tracer:
    """Makes a span for each call, as part of the trace that its requester names.

    Args:
        provider: OpenTelemetry's tracer provider; by default the global one.
    """

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import trace  # optional
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._tracer = trace.get_tracer("openenv", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def traced(self, call: WatchedCall) -> Iterator[None]:
        """Surround a call with a span; the environment's own spans are its children."""
        origin = call.origin
        parent = None
        attributes: dict[str, str | int] = {"openenv.session": call.session_id, "openenv.operation": call.kind}
        if origin is not None:
            if origin.traceparent is not None:
                parent = self._propagator.extract({"traceparent": origin.traceparent})
            if origin.request_id is not None:
                attributes["openenv.request"] = origin.request_id
        with self._tracer.start_as_current_span(
            f"openenv.{call.kind}", context=parent, kind=self._api.SpanKind.SERVER, attributes=attributes
        ) as span:
            try:
                yield
            finally:
                span.set_attribute("openenv.wait_s", call.began - call.submitted)
                if call.error is not None:
                    self._note(span, call.error)

    def _note(self, span: Any, error: BaseException) -> None:
        span.record_exception(error)
        span.set_attribute("openenv.error", error.code if isinstance(error, OpenEnvError) else "EXECUTION_ERROR")
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, type(error).__name__))
