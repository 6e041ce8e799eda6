"""`/metrics` and `/ready` on a real server: what they say agrees with what clients have done, in either mode."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.sync.client import ClientConnection, connect

import http_calls
from environments import Move, Place
from openenv import Observation, create_app
from openenv.server.access import AccessPolicy
from openenv.server.sessions.peers import boot_of
from servers import RunningServer, Serve


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    Place.gate.clear()
    return serve(create_app(Place, Move, Observation, max_concurrent_envs=2))


@contextmanager
def session(server: Any) -> Iterator[ClientConnection]:
    with connect(f"ws{server.url.removeprefix('http')}/ws", proxy=None) as socket:
        yield socket


def ask(socket: ClientConnection, kind: str, **data: Any) -> Any:
    socket.send(json.dumps({"type": kind, "data": data} if data or kind != "state" else {"type": kind}))
    return json.loads(socket.recv(20))


def metrics(server: Any) -> dict[tuple[str, ...], float]:
    """Read with the reference parser; keys are a sample's name and the values of its labels."""
    response = http_calls.get(f"{server.url}/metrics", trust_env=False)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.type in ("counter", "gauge", "histogram") and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_sessions_slots_and_steps_are_those_of_the_clients(server: RunningServer) -> None:
    with session(server) as first, session(server) as second:
        for socket in (first, second):
            ask(socket, "reset")
        for _ in range(5):
            ask(first, "step", to="north")
        seen = metrics(server)
        assert seen["openenv_session_slots",] == 2
        assert seen["openenv_session_slots_used",] == 2
        assert seen["openenv_sessions", "ready"] == 2
        assert seen["openenv_sessions_opened_total",] == 2
        assert seen["openenv_steps_total",] == 5
        assert seen["openenv_ready",] == 1
        assert seen["process_resident_memory_bytes",] > 1e6
    server.wait_for(lambda: metrics(server)["openenv_session_slots_used",] == 0)
    seen = metrics(server)
    assert seen["openenv_steps_total",] == 5
    assert seen["openenv_sessions_closed_total", "client disconnected"] == 2


def test_a_running_step_shows_as_a_busy_session(server: RunningServer) -> None:
    with session(server) as socket:
        ask(socket, "reset")
        socket.send(json.dumps({"type": "step", "data": {"to": "far away"}}))
        server.wait_for(lambda: metrics(server)["openenv_sessions", "busy"] == 1)
        Place.gate.set()
        socket.recv(20)
        server.wait_for(lambda: metrics(server)["openenv_sessions", "busy"] == 0)


def test_the_placement_of_a_class_and_the_hand_overs_are_shown(server: RunningServer) -> None:
    labels = ("openenv_runner_info", "thread", "Place")
    with session(server) as socket:
        ask(socket, "reset")
        placements = [key for key in metrics(server) if set(labels) <= set(key)]
        assert len(placements) == 1
        assert {"spread", "own", "shared"} & set(placements[0])
        for _ in range(20):
            ask(socket, "step", to="north")
        seen = metrics(server)
        outcomes = [seen["openenv_handovers_total", outcome] for outcome in ("quick", "late", "apart")]
        assert sum(outcomes) >= 21


def test_calls_are_timed_by_phase_from_the_first_reading_on(server: RunningServer) -> None:
    with session(server) as socket:
        ask(socket, "reset")
        ask(socket, "step", to="unseen")
        assert metrics(server)["openenv_call_seconds_count", "step", "run"] == 0
        for _ in range(300):
            ask(socket, "step", to="north")
        seen = metrics(server)
        for phase in ("wait", "run", "reply"):
            assert seen["openenv_call_seconds_count", "step", phase] == 300
            assert seen["openenv_call_seconds_bucket", "step", phase, "+Inf"] == 300
            assert 0 < seen["openenv_call_seconds_sum", "step", phase] < 60
        assert seen["openenv_steps_total",] == 301


def test_a_call_that_waits_for_its_turn_counts_the_wait(server: RunningServer) -> None:
    url = f"{server.url}/step"
    name = http_calls.post(f"{server.url}/reset", headers={"X-OpenEnv-Session": "new"}, trust_env=False).headers
    headers = {"X-OpenEnv-Session": name["X-OpenEnv-Session"]}
    metrics(server)

    def step(to: str) -> None:
        httpx2.post(url, json={"action": {"to": to}}, headers=headers, timeout=30, trust_env=False)

    steps = [threading.Thread(target=step, args=(to,)) for to in ("far away", "north")]
    steps[0].start()
    server.wait_for(lambda: metrics(server)["openenv_sessions", "busy"] == 1)
    steps[1].start()
    server.wait_for(lambda: len(server.manager.sessions()[0]._waiting) == 1)
    threading.Event().wait(0.2)
    Place.gate.set()
    for thread in steps:
        thread.join()
    seen = metrics(server)
    assert seen["openenv_call_seconds_sum", "step", "wait"] > 0.15
    assert seen["openenv_call_seconds_bucket", "step", "wait", "0.1"] <= 1
    assert seen["openenv_call_seconds_count", "step", "wait"] == 2


def test_errors_are_counted_by_code_on_every_surface(server: RunningServer) -> None:
    with session(server) as first, session(server) as second:
        ask(second, "reset")
        for _ in range(3):
            assert ask(first, "step", to="nowhere")["data"]["code"] == "EXECUTION_ERROR"
        ask(first, "dance")
        ask(first, "step", wrong="field")
        with session(server) as third:
            assert json.loads(third.recv(20))["data"]["code"] == "CAPACITY_REACHED"
        http_calls.post(f"{server.url}/step", json={}, trust_env=False)
        http_calls.get(f"{server.url}/state", headers={"X-OpenEnv-Session": "nobody"}, trust_env=False)
        seen = metrics(server)
    assert {key[1]: value for key, value in seen.items() if key[0] == "openenv_errors_total"} == {
        "EXECUTION_ERROR": 3,
        "UNKNOWN_TYPE": 1,
        "VALIDATION_ERROR": 2,
        "CAPACITY_REACHED": 1,
        "SESSION_NOT_FOUND": 1,
    }


def test_requests_without_a_token_and_of_foreign_pages_are_counted(serve: Serve) -> None:
    app = create_app(Place, Move, Observation)
    app.state.openenv_server.reconfigure(access=AccessPolicy(orchestrator="secret"))
    server = serve(app)
    http_calls.post(f"{server.url}/reset", trust_env=False)
    http_calls.post(f"{server.url}/reset", headers={"Origin": "http://elsewhere.example"}, trust_env=False)
    assert http_calls.get(f"{server.url}/metrics", trust_env=False).status_code == 401
    response = http_calls.get(f"{server.url}/metrics", headers={"Authorization": "Bearer secret"}, trust_env=False)
    assert 'openenv_errors_total{code="UNAUTHORIZED"} 2' in response.text
    assert 'openenv_errors_total{code="FOREIGN_ORIGIN"} 1' in response.text
    assert http_calls.get(f"{server.url}/ready", trust_env=False).status_code == 200


def test_an_environment_that_cannot_be_built_is_one_factory_error(serve: Serve) -> None:
    class Broken(Place):
        def __init__(self) -> None:
            raise OSError("no such device")

    server = serve(create_app(Broken, Move, Observation))
    with session(server) as socket:
        assert json.loads(socket.recv(20))["data"]["code"] == "FACTORY_ERROR"
    errors = {key[1]: value for key, value in metrics(server).items() if key[0] == "openenv_errors_total"}
    assert errors == {"FACTORY_ERROR": 1}


def test_repeated_requests_and_resumed_sessions_are_counted(server: RunningServer) -> None:
    address = f"ws{server.url.removeprefix('http')}/ws"
    with connect(address, proxy=None, subprotocols=["openenv.v2.json"]) as socket:  # type: ignore[list-item]
        socket.send('{"type": "open", "id": 1}')
        token = json.loads(socket.recv(20))["token"]
        for request_id in (1, 1, 1):
            socket.send(json.dumps({"type": "reset", "id": request_id}))
            assert json.loads(socket.recv(20))["type"] == "observation"
    server.wait_for(lambda: metrics(server)["openenv_sessions", "detached"] == 1)
    assert metrics(server)["openenv_ledger_hits_total",] == 2
    with connect(address, proxy=None, subprotocols=["openenv.v2.json"]) as socket:  # type: ignore[list-item]
        socket.send(json.dumps({"type": "open", "id": 1, "resume": token}))
        assert json.loads(socket.recv(20))["resumed"] is True
        seen = metrics(server)
        assert seen["openenv_resumes_total",] == 1
        assert seen["openenv_sessions", "detached"] == 0
        socket.send(json.dumps({"type": "close", "id": 9}))
        socket.recv(20)
    server.wait_for(lambda: metrics(server)["openenv_session_slots_used",] == 0)
    assert metrics(server)["openenv_ledger_hits_total",] == 2


@pytest.mark.parametrize("mode", ["simulation", "production"])
def test_readiness_tells_how_full_the_server_is_in_either_mode(serve: Serve, mode: str) -> None:
    server = serve(create_app(Place, Move, Observation, max_concurrent_envs=3, mode=mode))
    with session(server):
        server.wait_for(lambda: server.manager.active == 1)
        response = http_calls.get(f"{server.url}/ready", trust_env=False)
        assert response.status_code == 200
        shown = response.json()
        assert boot_of(server.manager.peers.new_id()) == shown.pop("server")
        assert shown == {"status": "ready", "active_sessions": 1, "max_sessions": 3, "workers": 1, "hung_workers": 0}
        assert metrics(server)["openenv_session_slots",] == 3


def test_a_server_that_admits_no_sessions_is_alive_but_not_ready(server: RunningServer) -> None:
    server.manager.stop_admitting()
    response = http_calls.get(f"{server.url}/ready", trust_env=False)
    assert (response.status_code, response.json()["status"]) == (503, "draining")
    assert http_calls.get(f"{server.url}/health", trust_env=False).json() == {"status": "healthy"}
    assert metrics(server)["openenv_ready",] == 0
    with session(server) as socket:
        refused = json.loads(socket.recv(20))["data"]
    assert refused["code"] == "CAPACITY_REACHED"
    assert "shutting down" in refused["message"]


def test_both_routes_are_in_the_openapi_document(server: RunningServer) -> None:
    paths = http_calls.get(f"{server.url}/openapi.json", trust_env=False).json()["paths"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert set(paths["/ready"]["get"]["responses"]) >= {"200", "503"}
