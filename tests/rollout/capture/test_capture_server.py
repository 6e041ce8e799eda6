"""A key per rollout, control routes for the admin key only, the agents' socket, budgets, no mixing of rollouts."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import http_calls
from openenv.errors import CaptureError
from openenv.rollout.capture import CaptureOptions, CaptureServer, read
from openenv.rollout.tasks.task import Budget, Model, Sampling

ADMIN = {"authorization": "Bearer the-admin-key"}


def test_a_key_is_needed_and_decides_the_rollout(server: CaptureServer, open_agent: Callable[..., Any]) -> None:
    one, other = open_agent("one"), open_agent("other")
    assert one.capture.key != other.capture.key
    assert len(one.capture.key) > 40
    one.chat("from one")
    other.headers = {"x-api-key": other.capture.key}
    other.chat("from other")
    assert [call.request["messages"][0]["content"] for call in one.capture.calls()] == ["from one"]
    assert [call.request["messages"][0]["content"] for call in other.capture.calls()] == ["from other"]
    for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": "Basic x"}, ADMIN):
        assert one.client.post("/chat/completions", json={"messages": []}, headers=headers).status_code == 401


def test_control_routes_are_for_the_admin_key_only(server: CaptureServer, agent: Any) -> None:
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/sessions").status_code == 401
        assert client.get("/sessions", headers=agent.headers).status_code == 403
        assert client.post("/sessions", json={}, headers=agent.headers).status_code == 403
        assert client.delete(f"/sessions/{agent.capture.rollout_id}", headers=agent.headers).status_code == 403
        assert client.get("/sessions", headers=ADMIN).status_code == 200
    transport = httpx2.HTTPTransport(uds=str(server.socket))
    with httpx2.Client(base_url="http://proxy", transport=transport, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/sessions", headers=agent.headers).status_code == 404
        assert client.get("/sessions", headers=ADMIN).status_code == 401
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=body, headers=agent.headers).status_code == 200
        names = [model["id"] for model in client.get("/v1/models", headers=agent.headers).json()["data"]]
        assert names == ["real-model"]


def test_a_server_without_an_admin_key_has_no_control_routes(tmp_path: Path) -> None:
    with CaptureServer(tmp_path) as server, http_calls.Client(base_url=server.url, trust_env=False) as client:
        capture = server.open("r", Model(base_url="http://127.0.0.1:9", name="m"))
        assert client.get("/sessions", headers={"x-api-key": capture.key}).status_code == 404
        assert client.get("/sessions").status_code == 401


def test_sessions_are_opened_shown_exported_and_closed_over_http(server: CaptureServer, engine: Any) -> None:
    with http_calls.Client(base_url=server.url, headers=ADMIN, trust_env=False) as client:
        body = {
            "session_id": "s1",
            "llm_url": engine.url,
            "model": "m",
            "metadata": {"task": "t"},
            "max_model_calls": 1,
            "sampling": Sampling().parameters(),
        }
        opened = client.post("/sessions", json=body).json()
        assert opened["session_id"] == "s1"
        assert client.post("/sessions", json=body).status_code == 409
        assert client.post("/sessions", json={"model": "m"}).status_code == 422
        assert client.post("/sessions", json={**body, "session_id": "../x"}).status_code == 409
        key = {"x-api-key": opened["api_key"]}
        ask = {"messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=ask, headers={**key, "authorization": ""}).status_code == 200
        about = client.get("/sessions/s1").json()
        assert (about["stats"]["calls"], about["stats"]["budget_exhausted"]) == (1, "calls")
        document = client.get("/sessions/s1/rollout?include_messages=true").json()
        assert document["capture_level"] == "tokens"
        assert document["stats"]["n_trainable_tokens"] == 3
        assert document["turns"][0]["request"]["messages"] == ask["messages"]
        (entry,) = client.get("/sessions/s1/trace_entries").json()["entries"]
        assert entry["completion_token_ids"] == [11, 12, 13]
        assert client.get("/sessions/none").status_code == 404
        assert client.delete("/sessions/s1").json() == {"session_id": "s1", "closed": True}
        assert client.post("/v1/chat/completions", json=ask, headers={**key, "authorization": ""}).status_code == 401
        assert [item["session_id"] for item in client.get("/sessions").json()["sessions"]] == ["s1"]
    assert read(server.root / "s1").calls[0].completion.sampled.ids == (11, 12, 13)


def test_a_session_that_is_not_trainable_has_no_trace_entries(server: CaptureServer, engine: Any, fake: Any) -> None:
    plain = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}
    engine.respond = lambda request: fake.Answer.json(plain)
    with http_calls.Client(base_url=server.url, headers=ADMIN, trust_env=False) as client:
        opened = client.post("/sessions", json={"llm_url": engine.url, "model": "m"}).json()
        ask = {"messages": [{"role": "user", "content": "hi"}]}
        client.post("/v1/chat/completions", json=ask, headers={"authorization": f"Bearer {opened['api_key']}"})
        assert client.get(f"/sessions/{opened['session_id']}/trace_entries").status_code == 409


def test_ids_are_not_given_twice_and_are_names_of_folders(server: CaptureServer) -> None:
    model = Model(base_url="http://127.0.0.1:9", name="m")
    first = server.open("same", model)
    with pytest.raises(CaptureError, match="already"):
        server.open("same", model)
    first.close()
    with pytest.raises(CaptureError, match="already"):
        server.open("same", model)
    for bad in ("../up", "a/b", ".hidden", "x" * 200, "a b"):
        with pytest.raises(CaptureError, match="cannot be the id"):
            server.open(bad, model)
    assert len({server.open(None, model).rollout_id for _ in range(5)}) == 5


def test_records_are_for_their_owner_only_and_hold_no_key(server: CaptureServer, agent: Any) -> None:
    agent.chat()
    file = agent.capture.path / "calls.log"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    data = file.read_bytes()
    assert agent.capture.key.encode() not in data
    assert b"sk-real-secret" not in data


def test_anything_but_loopback_needs_an_admin_key(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="admin_key"):
        CaptureServer(tmp_path, CaptureOptions(host="0.0.0.0"))
    CaptureServer(tmp_path, CaptureOptions(host="0.0.0.0", admin_key="k"))
    command = [sys.executable, "-m", "openenv.rollout.capture", "--root", str(tmp_path), "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "admin_key" in done.stderr


def test_the_process_says_where_it_listens_and_stops_on_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "openenv.rollout.capture", "--root", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        folder = Path(about["socket"]).parent
        assert http_calls.get(f"{about['url']}/health", trust_env=False).json() == {"status": "ok"}
        process.terminate()
        assert process.wait(20) == 0
    assert not folder.exists()


def test_the_socket_of_a_killed_proxy_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name)  # not the usual folder: there any other proxy that starts would remove it as well
        command = [sys.executable, "-m", "openenv.rollout.capture", "--root", str(tmp_path), "--port", "0"]
        environ = {**os.environ, "TMPDIR": str(shared)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None
            left = Path(json.loads(process.stdout.readline())["socket"])
            process.kill()
            process.wait(20)
        assert left.exists()
        options = CaptureOptions(sockets=shared)
        with CaptureServer(tmp_path, options) as one, CaptureServer(tmp_path, options) as other:
            assert not left.parent.exists()
            assert one.socket.exists()
            assert other.socket.exists()
        assert not one._folder


def test_many_rollouts_at_once_never_mix(open_agent: Callable[..., Any], engine: Any, fake: Any) -> None:
    def respond(request: Any) -> Any:
        number = int(request.body["messages"][0]["content"])
        return fake.vllm([number * 1000 + position for position in range(20)], delay_s=0.001)(request)

    engine.respond = respond
    agents = [open_agent(f"r{number}") for number in range(20)]

    def work(number: int) -> None:
        for _ in range(3):
            agents[number].chat_stream(str(number))

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(work, range(20)))
    for number, agent in enumerate(agents):
        calls = agent.capture.calls()
        assert len(calls) == 3
        for call in calls:
            assert call.completion.sampled.ids == tuple(number * 1000 + position for position in range(20))


def test_an_exhausted_budget_answers_in_the_models_place_and_is_no_turn(
    open_agent: Callable[..., Any], engine: Any
) -> None:
    agent = open_agent(budget=Budget(max_calls=1))
    agent.chat()
    answer = agent.chat().json()
    assert answer["choices"][0]["message"]["content"] == "Step budget exhausted; stopping."
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = agent.chat_stream()
    assert chunks[0]["choices"][0]["delta"]["content"] == "Step budget exhausted; stopping."
    message = agent.post("/messages", {"model": "m", "max_tokens": 5, "messages": []}).json()
    assert message["content"][0]["text"] == "Step budget exhausted; stopping."
    events = agent.stream("/responses", {"model": "m", "input": "hi", "stream": True})
    assert events[-1]["type"] == "response.completed"
    assert len(engine.requests) == 1
    stats = agent.capture.stats()
    assert (stats.calls, stats.budget_exhausted, stats.budget_stops) == (1, "calls", 4)
    assert len(agent.capture.turns()) == 1
    assert len(agent.capture.recording().stops) == 4


def test_tokens_and_seconds_are_budgets_too(open_agent: Callable[..., Any], engine: Any) -> None:
    agent = open_agent(budget=Budget(max_completion_tokens=5))
    agent.chat_stream()
    agent.chat()
    assert [request.body["max_tokens"] for request in engine.requests] == [5, 2]
    assert "budget" in agent.chat().text
    assert agent.capture.stats().budget_exhausted == "completion_tokens"
    late = open_agent(budget=Budget(max_seconds=0))
    assert "budget" in late.chat().text
    assert late.capture.stats().budget_exhausted == "seconds"


def test_the_version_of_the_policy_comes_from_a_header_or_an_address(
    server: CaptureServer, open_agent: Callable[..., Any], engine: Any, fake: Any
) -> None:
    good = fake.vllm([1])

    def respond(request: Any) -> Any:
        if request.method == "GET":
            return fake.Answer.json({"version": 43})
        answer = good(request)
        answer.headers["X-Policy-Version"] = "42"
        return answer

    engine.respond = respond
    agent = open_agent()
    agent.chat_stream()
    assert agent.capture.calls()[0].policy_version == "42"
    capture = server.open("asked", Model(base_url=engine.url, name="m", policy_url=f"{engine.url}/version"))
    agent.headers = {"x-api-key": capture.key}
    agent.chat()
    assert capture.calls()[0].policy_version == "43"


def test_memory_of_closed_rollouts_is_released_and_their_records_stay(tmp_path: Path, engine: Any) -> None:
    with CaptureServer(tmp_path, CaptureOptions(closed_ttl_s=0.0)) as server:
        capture = server.open("r", Model(base_url=engine.url, name="m"))
        url = f"{server.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hi"}]}
        http_calls.post(url, json=body, headers={"x-api-key": capture.key}, trust_env=False)
        capture.close()
        server._registry.sweep()
        assert server.rollouts() == []
        assert len(capture.calls()) == 1
        assert capture.stats().endings == {"complete": 1}


def test_a_server_that_stops_ends_its_calls_and_frees_its_port(tmp_path: Path, engine: Any, fake: Any) -> None:
    engine.respond = fake.vllm(list(range(1, 500)), delay_s=0.01)
    server = CaptureServer(tmp_path).start()
    capture = server.open("r", Model(base_url=engine.url, name="m"))
    body = {"stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with http_calls.Client(trust_env=False) as client:
        url = f"{server.url}/v1/chat/completions"
        with client.stream("POST", url, json=body, headers={"x-api-key": capture.key}) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            with pytest.raises(httpx2.RemoteProtocolError):
                list(lines)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))
    assert capture.calls()[0].ended == "revoked"
    capture.revoke()  # it is, already
    capture.close()
    with pytest.raises(CaptureError, match="does not run"):
        _ = server.socket
