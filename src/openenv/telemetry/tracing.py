"""OpenTelemetry spans: one for each call of a session, as part of the trace that its requester names.

Used only where OpenTelemetry is set up already: whoever does so has a tracer provider. Nothing is imported, and nothing
costs, where nobody has. Knows the OpenTelemetry API and watched calls; must not know exporters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import OpenEnvError
from .calls import CallWatch, WatchedCall

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
