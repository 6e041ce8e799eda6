"""OpenTelemetry spans: one for each call, in the trace that its client names; none where it is not set up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from websockets.sync.client import connect

import http_calls
from environments import Idle, Move
from openenv import Observation, create_app
from openenv.server.telemetry.watched_calls import Tracer
from servers import Serve

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
INNER = "inside the environment"


class Place(Idle):
    tracer: Any = None

    def reset(self, **kwargs: Any) -> Observation:
        with self.tracer.start_as_current_span(INNER):
            return Observation()

    def step(self, action: Move, **kwargs: Any) -> Observation:
        raise RuntimeError("there is no such place")


class Traced:
    def __init__(self, server: Any, exporter: InMemorySpanExporter) -> None:
        self.server = server
        self._exporter = exporter

    def spans(self, count: int) -> list[ReadableSpan]:
        """Wait for so many spans of requests."""
        self.server.wait_for(lambda: len(self._finished()) >= count)
        return self._finished()

    def _finished(self) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name != "openenv.construct"]


@pytest.fixture(params=["thread", "inline"])
def traced(serve: Serve, request: pytest.FixtureRequest) -> Iterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Place.tracer = provider.get_tracer("the environment")
    app = create_app(Place, Move, Observation, max_concurrent_envs=4, runner=request.param)
    app.state.openenv_server.monitoring.watch.surround(Tracer(provider).traced)
    yield Traced(serve(app), exporter)
    provider.shutdown()


def parent_of(span: ReadableSpan) -> tuple[str, str]:
    assert span.parent is not None
    return format(span.parent.trace_id, "032x"), format(span.parent.span_id, "016x")


def test_a_call_over_http_is_part_of_the_trace_in_its_header(traced: Traced) -> None:
    headers = {"traceparent": PARENT, "X-OpenEnv-Session": "new", "Idempotency-Key": "request-number-seven"}
    http_calls.post(f"{traced.server.url}/reset", headers=headers, trust_env=False).raise_for_status()
    inner, outer = traced.spans(2)
    assert (inner.name, outer.name) == (INNER, "openenv.reset")
    assert parent_of(outer) == (TRACE, SPAN)
    assert outer.context is not None
    assert parent_of(inner) == (TRACE, format(outer.context.span_id, "016x"))
    assert outer.attributes is not None
    assert outer.attributes["openenv.operation"] == "reset"
    assert outer.attributes["openenv.request"] == "request-number-seven"
    assert outer.attributes["openenv.session"] == traced.server.manager.sessions()[0].id


def test_calls_of_a_socket_are_part_of_the_trace_of_its_handshake(traced: Traced) -> None:
    address = f"ws{traced.server.url.removeprefix('http')}/ws"
    with connect(address, proxy=None, additional_headers={"traceparent": PARENT}) as socket:
        for frame in ({"type": "reset"}, {"type": "step", "data": {}}):
            socket.send(json.dumps(frame))
            socket.recv(20)
        _, reset, step = traced.spans(3)
    assert parent_of(reset) == parent_of(step) == (TRACE, SPAN)
    assert step.status.status_code is trace.StatusCode.ERROR
    assert step.attributes is not None
    assert step.attributes["openenv.error"] == "EXECUTION_ERROR"
    assert [event.name for event in step.events] == ["exception"]


def test_each_request_of_protocol_v2_may_name_its_own_trace(traced: Traced) -> None:
    address = f"ws{traced.server.url.removeprefix('http')}/ws"
    other = "00-11111111111111111111111111111111-2222222222222222-01"
    with connect(
        address,
        proxy=None,
        additional_headers={"traceparent": PARENT},
        subprotocols=["openenv.v2.json"],  # type: ignore[list-item]
    ) as socket:
        socket.send('{"type": "open", "id": 1}')
        socket.recv(20)
        for number, extra in enumerate(({}, {"traceparent": other}), 1):
            socket.send(json.dumps({"type": "step", "id": number, "data": {}, **extra}))
            assert json.loads(socket.recv(20))["data"]["code"] == "EXECUTION_ERROR"
        first, second = traced.spans(2)
    assert parent_of(first) == (TRACE, SPAN)
    assert parent_of(second) == ("1" * 32, "2" * 16)
    assert first.attributes is not None
    assert first.attributes["openenv.request"] == 1


def test_a_trace_that_is_none_begins_a_new_one(traced: Traced) -> None:
    headers = {"traceparent": "nonsense"}
    http_calls.post(f"{traced.server.url}/reset", headers=headers, trust_env=False).raise_for_status()
    _, outer = traced.spans(2)
    assert outer.parent is None


SET_UP = """
import sys
from openenv import Action, Environment, Observation, State, create_app
if "sdk" in sys.argv:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    trace.set_tracer_provider(TracerProvider())
elif "api" in sys.argv:
    import opentelemetry.trace

class Still(Environment[Action, Observation, State]):
    def reset(self, **kwargs): return Observation()
    def step(self, action, **kwargs): return Observation()
    state = State()

app = create_app(Still, Action, Observation)
from starlette.testclient import TestClient
with TestClient(app) as client:
    assert client.post("/reset").status_code == 200
    watch = app.state.openenv_server.monitoring.watch
    print(len(watch.surroundings))
"""


@pytest.mark.slow_but_for("sdk-1")
@pytest.mark.parametrize(("what", "expected"), [("sdk", "1"), ("api", "0"), ("nothing", "0")])
def test_tracing_begins_with_the_server_and_only_where_opentelemetry_is_set_up(what: str, expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", SET_UP, what], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == expected, done.stderr
