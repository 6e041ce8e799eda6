"""Calls that are watched: when each was asked for, began, ended and was answered, and what surrounds its run.

A session makes its calls with whatever factory it is given; while nobody watches, that is the plain class, and none of
this is there. Knows sessions' calls; must not know what is made of the times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from time import perf_counter
from typing import Any

from ..errors import OpenEnvError
from ..runners import Dispatcher
from ..sessions.events import RequestOrigin
from ..sessions.manager import SessionManager
from ..sessions.operations import Operation
from ..sessions.session import Done, Session, SessionCall
from .prometheus import Histograms

Surrounding = Callable[["WatchedCall"], AbstractContextManager[None]]
PHASES = ("wait", "run", "reply")
CURRENT: ContextVar[WatchedCall | None] = ContextVar("openenv_call", default=None)


class CallWatch:
    """What is done about each call of a manager's sessions; nothing until somebody asks for it."""

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
            self._manager.make_calls_with(partial(WatchedCall, self), observe_step=self._observe_step)

    def _observe_step(self, wait_s: float, run_s: float, reply_s: float) -> None:
        self.times["step"].observe(wait_s, run_s, reply_s)

    def name_calls(self) -> None:
        """Let `CURRENT` be the call that runs or is answered, from now on."""
        self.names_calls = self._is_on = True
        self._manager.make_calls_with(partial(WatchedCall, self), with_origins=True)

    def surround(self, surrounding: Surrounding) -> None:
        """Run each call inside a context of its own from now on."""
        self.surroundings += (surrounding,)
        self.name_calls()


class _Times(dict[str, Histograms]):
    """The times of calls, by kind; a kind that is new gets its histograms."""

    def __missing__(self, kind: str) -> Histograms:
        return self.setdefault(kind, Histograms(len(PHASES)))


class WatchedCall(SessionCall):
    """A call that notes its times. The plain methods are called by name: `super()` costs more than they do."""

    __slots__ = ("_inside", "_watch", "asked", "began", "ended")

    def __init__(
        self,
        watch: CallWatch,
        session: Session,
        operation: Operation,
        argument: Any,
        done: Done,
        hub: Dispatcher,
        origin: RequestOrigin | None = None,
    ) -> None:
        SessionCall.__init__(self, session, operation, argument, done, hub, origin)
        self._watch = watch
        self._inside: ExitStack | None = None
        self.began = 0.0
        self.asked = perf_counter()

    @property
    def session_id(self) -> str:
        """Whose call it is."""
        return self._session.id

    def run(self) -> None:
        """Do the work, in the lane."""
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
        """Tell the requester, on its own loop."""
        self.ended = perf_counter()
        if self._inside is not None:
            # Before anything is handed on: other calls' answers may follow in the context in which this one's is.
            inside, self._inside = self._inside, None
            inside.close()
        SessionCall.settle(self, error)

    def deliver(self) -> None:
        """Hand the outcome over."""
        if self._watch.names_calls:
            token = CURRENT.set(self)
            try:
                self._done(self.result, self.error)
            finally:
                CURRENT.reset(token)
        else:
            self._done(self.result, self.error)
        began, ended = self.began, self.ended
        if began:  # else it was refused before its turn
            self._watch.times[self.kind].observe(began - self.asked, ended - began, perf_counter() - ended)


# tracing: OpenTelemetry spans: one for each call of a session, as part of the trace that its requester names.
#
# Used only where OpenTelemetry is set up already: whoever does so has a tracer provider. Nothing is imported, and nothing
# costs, where nobody has. Knows the OpenTelemetry API and watched calls; must not know exporters.


_API = "opentelemetry.trace"


def trace_if_set_up(watch: CallWatch) -> bool:
    """Trace each call from now on if OpenTelemetry has a tracer provider; say whether it has."""
    api = sys.modules.get(_API)
    if api is None:
        return False
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return False
    watch.surround(Tracer(provider).traced)
    return True


class Tracer:
    """Makes a span for each call.

    Args:
        provider: OpenTelemetry's tracer provider; by default the one that is set up globally.
    """

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import trace  # optional
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._tracer = trace.get_tracer("openenv", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def traced(self, call: WatchedCall) -> Iterator[None]:
        """Surround a call with a span; spans that its environment makes are inside."""
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
                span.set_attribute("openenv.wait_s", call.began - call.asked)
                if call.error is not None:
                    self._note(span, call.error)

    def _note(self, span: Any, error: BaseException) -> None:
        span.record_exception(error)
        span.set_attribute("openenv.error", error.code if isinstance(error, OpenEnvError) else "EXECUTION_ERROR")
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, type(error).__name__))
