"""The capture server of the published interface: sessions by key, routes, budgets, graphs, documents."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from openenv.core.harness import TrainingTrace
from openenv.core.harness.capture import CaptureServer, to_trace_entries, to_training_trace, to_turn_records
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.runner import create_app
from openenv.core.harness.capture.server import main
from openenv.sandboxes.host import scratch_root
from waiting import wait_until

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
QUESTION = [{"role": "user", "content": "hi"}]


class Caller:
    """An agent, or the holder of the admin key: calls with a key."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx2.Client(base_url=url, timeout=20, trust_env=False, verify=False)
        self._headers = {"authorization": f"Bearer {key}"}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return self._client.request(method, path, json=body, headers={**self._headers, **headers})

    def chat(self, messages: list[Any] = QUESTION, **body: Any) -> httpx2.Response:
        return self("POST", "/v1/chat/completions", {"model": "agents-name", "messages": messages, **body})


@pytest.fixture
def proxy(engine: Any) -> Iterator[CaptureServer]:
    with CaptureServer(llm_url=engine.url, model="m", port=0, admin_key="the-admin-key") as running:
        yield running


@pytest.fixture
def admin(proxy: CaptureServer) -> Caller:
    return Caller(proxy.url, "the-admin-key")


def two_turns(agent: Caller, **body: Any) -> None:
    """Ask, and go on from the answer."""
    answer = agent.chat([{"role": "user", "content": "hi", "ids": [1, 2, 3]}], **body)
    assert answer.status_code == 200, answer.text
    context = {"role": "user", "content": "go on", "ids": [1, 2, 3, 11, 12, 13, 7]}
    assert agent.chat([context], **body).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_session_is_captured_under_its_id_as_key(proxy: CaptureServer, engine: Any, is_streamed: bool) -> None:
    session = proxy.registry.create("rollout-1", task="t1")
    two_turns(Caller(proxy.url, "rollout-1"), tools=TOOLS, stream=is_streamed)
    graph = session.graph
    assert graph.stats() == {"n_turns": 2, "n_roots": 1, "n_leaves": 1, "n_forks": 0, "n_discarded": 0}
    document = export_session(session, capture_level=proxy.capture_level)
    [row] = document["sequences"]
    assert row["input_ids"] == [1, 2, 3, 11, 12, 13, 7, 11, 12, 13]
    assert row["loss_mask"] == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert row["logprobs"] == pytest.approx([0, 0, 0, -0.011, -0.012, -0.013, 0, -0.011, -0.012, -0.013])
    assert document["trainable"], document["validation"]
    assert document["metadata"]["task"] == "t1"
    trace = to_training_trace(graph, document)
    assert isinstance(trace, TrainingTrace)
    assert [turn.completion_token_ids for turn in trace.turns] == [[11, 12, 13]] * 2
    assert [len(record[0]) for record in to_turn_records(graph, document)] == [3, 7]
    [first, _] = to_trace_entries(graph, document)
    assert first["request"]["tools"] == TOOLS
    assert first["metadata"]["model"] == "m"
    assert [request.body["stream"] for request in engine.requests] == [is_streamed] * 2
    assert (session.model_calls, session.upstream_errors, session.over_budget) == (2, 0, False)


def test_an_agent_gets_a_stream_as_it_comes(proxy: CaptureServer, engine: Any, fake: ModuleType) -> None:
    # The published server answers only once the whole completion is there.
    def respond(request: Any) -> Any:
        return fake.Answer.events(
            fake.event({**fake.chat_chunk({"content": "first"}), "prompt_token_ids": [1]}), 5.0, fake.DONE
        )

    engine.respond = respond
    proxy.registry.create("s1")
    with httpx2.Client(base_url=proxy.url, timeout=20, trust_env=False, verify=False) as client:
        body = {"model": "m", "messages": QUESTION, "stream": True}
        with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"authorization": "Bearer s1"}
        ) as response:
            assert b"first" in next(response.iter_raw())


def test_a_training_policy_is_what_the_endpoint_gets(proxy: CaptureServer, engine: Any) -> None:
    session = proxy.registry.create("s1", purpose="train", sampling={"temperature": 0.7})
    agent = Caller(proxy.url, "s1")
    assert agent.chat(temperature=0.1, top_p=0.5, tools=TOOLS).status_code == 200
    assert agent.chat(temperature=0.1, tools=TOOLS, tool_choice="required").status_code == 200
    sent = engine.requests[0].body
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 1.0, -1)
    free, forced = session.graph.nodes()
    assert free.sampling_params["temperature"] == 0.7
    assert free.requested_sampling_params == {"temperature": 0.1, "top_p": 0.5}
    assert session.metadata["sampling_overridden"] == {"top_p": 0.5}
    assert (free.trainable, forced.trainable) == (True, False)
    document = export_session(session)
    assert [sum(entry["loss_mask"]) for entry in to_trace_entries(session.graph, document)] in ([3, 0], [3])


def test_without_a_policy_the_temperature_is_the_agents_and_nothing_truncates(
    proxy: CaptureServer, engine: Any
) -> None:
    session = proxy.registry.create("s1")
    assert Caller(proxy.url, "s1").chat(temperature=0.3, top_p=0.5, tools=TOOLS).status_code == 200
    sent = engine.requests[0].body
    assert (sent["temperature"], sent["top_p"]) == (0.3, 1.0)
    assert export_session(session)["trainable"]


def test_an_evaluation_samples_as_it_was_asked_to(proxy: CaptureServer, engine: Any) -> None:
    own = proxy.registry.create("own", purpose="eval")
    proxy.registry.create("pinned", purpose="eval", eval_sampling={"temperature": 0.0})
    assert Caller(proxy.url, "own").chat(temperature=0.3, top_p=0.5, logit_bias={"5": 1}).status_code == 200
    assert Caller(proxy.url, "pinned").chat(temperature=0.3, top_p=0.5).status_code == 200
    first, second = (request.body for request in engine.requests)
    assert (first["temperature"], first["top_p"], first["logit_bias"]) == (0.3, 0.5, {"5": 1})
    assert (second["temperature"], second["top_p"]) == (0.0, 0.5)
    document = export_session(own)
    assert (document["rollout_type"], document["trainable"]) == ("eval", False)
    with pytest.raises(ValueError, match="EVAL rollout"):
        to_trace_entries(own.graph, document)


def test_the_budget_answers_in_the_models_place(proxy: CaptureServer, engine: Any) -> None:
    session = proxy.registry.create("s1", max_model_calls=1)
    agent = Caller(proxy.url, "s1")
    agent.chat()
    last = agent.chat().json()["choices"][0]
    assert last["message"]["content"] == "Step budget exhausted; stopping."
    assert last["finish_reason"] == "stop"
    assert len(engine.requests) == 1
    assert (session.model_calls, session.budget_stop_count, session.over_budget) == (1, 1, True)
    assert session.graph.stats()["n_turns"] == 1


def test_other_dialects_become_the_same_nodes(proxy: CaptureServer) -> None:
    session = proxy.registry.create("s1")
    agent = Caller(proxy.url, "s1")
    message = {"model": "m", "max_tokens": 9, "messages": QUESTION}
    answer = agent("POST", "/v1/messages", message, **{"anthropic-version": "2023-06-01"})
    assert answer.json()["content"][0]["text"] == "t11 t12 t13 "
    response = agent("POST", "/v1/responses", {"model": "m", "input": "hi", "instructions": "be"})
    assert response.json()["status"] == "completed"
    assert [node.sampled_ids for node in session.graph.nodes()] == [[11, 12, 13]] * 2
    assert session.graph.nodes()[1].system_digest is not None
    count = agent("POST", "/v1/messages/count_tokens", message)
    assert count.json()["input_tokens"] >= 1
    assert session.model_calls == 2


def test_the_admin_routes(admin: Caller, proxy: CaptureServer, engine: Any) -> None:
    made = admin("POST", "/sessions", {"session_id": "s1", "metadata": {"task": "t"}, "max_model_calls": 5})
    assert made.json() == {
        "session_id": "s1",
        "capture_level": "tokens",
        "rollout_type": "train",
        "max_model_calls": 5,
        "llm_url": engine.url,
        "model": "m",
    }
    two_turns(Caller(proxy.url, "s1"), tools=TOOLS)
    [line] = admin("GET", "/sessions").json()["sessions"]
    assert (line["session_id"], line["turns"], line["roots"], line["task"]) == ("s1", 2, 1, "t")
    assert admin("GET", "/sessions/s1").json()["n_turns"] == 2
    document = admin("GET", "/sessions/s1/rollout?include_messages=true").json()
    assert document["turns"][0]["request_messages"][0]["content"] == "hi"
    entries = admin("GET", "/sessions/s1/trace_entries").json()["entries"]
    assert [entry["completion_token_ids"] for entry in entries] == [[11, 12, 13]] * 2
    assert admin("DELETE", "/sessions/s1").json() == {"deleted": True}
    assert admin("DELETE", "/sessions/s1").json() == {"deleted": False}
    assert admin("GET", "/sessions/s1").status_code == 404
    assert Caller(proxy.url, "s1").chat().status_code == 401


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"metadata": []}, "metadata"),
        ({"metadata": {"purpose": "x"}}, "reserved"),
        ({"max_model_calls": -1}, "non-negative"),
        ({"purpose": "play"}, "purpose"),
        ({"sampling": {"temperature": 0}}, "positive temperature"),
        ({"sampling": {"temperature": 1, "top_p": 0.5}}, "top_p"),
        ({"eval_sampling": {"temperature": 0.5}}, "eval purpose"),
        ({"purpose": "eval", "sampling": {"temperature": 1}}, "eval purpose"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused(admin: Caller, body: Any, reason: str) -> None:
    answer = admin("POST", "/sessions", body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_an_id_is_taken_once(admin: Caller, proxy: CaptureServer) -> None:
    # The published server lets the second caller into the session of the first.
    assert admin("POST", "/sessions", {"session_id": "s1"}).status_code == 200
    assert admin("POST", "/sessions", {"session_id": "s1"}).status_code == 409
    with pytest.raises(ValueError, match="already"):
        proxy.registry.create("s1")


def test_an_eval_session_has_no_trace_entries(admin: Caller, proxy: CaptureServer) -> None:
    admin("POST", "/sessions", {"session_id": "s1", "purpose": "eval"})
    Caller(proxy.url, "s1").chat()
    answer = admin("GET", "/sessions/s1/trace_entries")
    assert answer.status_code == 409
    assert "EVAL" in answer.json()["error"]


def test_sessions_are_for_the_admin_key_and_never_on_the_sandboxes_socket(proxy: CaptureServer) -> None:
    for method, path in (("POST", "/sessions"), ("GET", "/sessions"), ("GET", "/sessions/x/rollout")):
        assert Caller(proxy.url, "wrong")(method, path).status_code == 401
    transport = httpx2.HTTPTransport(uds=str(proxy.socket), verify=False)
    with httpx2.Client(transport=transport, base_url="http://proxy", trust_env=False) as client:
        headers = {"authorization": "Bearer the-admin-key"}
        assert client.get("/sessions", headers=headers).status_code == 404
        assert client.get("/health").json()["status"] == "ok"


def test_what_the_endpoint_refuses_is_passed_on_and_failures_are_counted(
    proxy: CaptureServer, engine: Any, fake: ModuleType
) -> None:
    session = proxy.registry.create("s1")
    engine.respond = lambda request: fake.Answer.json({"error": {"message": "no images here"}}, 400)
    answer = Caller(proxy.url, "s1").chat()
    assert answer.status_code == 400
    assert "no images" in answer.text
    assert session.upstream_errors == 1
    assert session.graph.stats()["n_turns"] == 0
    assert "[FATAL] no_turns" in export_session(session)["validation"][0]


def test_what_a_provider_asks_for_is_done_where_nothing_is_trained(
    proxy: CaptureServer, engine: Any, fake: ModuleType
) -> None:
    def respond(request: Any) -> Any:
        if request.body.get("temperature") not in (None, 1):
            message = "Unsupported value: 'temperature' does not support 0.3 with this model."
            return fake.Answer.json({"error": {"message": message, "code": "unsupported_value"}}, 400)
        if request.body.get("reasoning_effort") != "none":
            message = "Function tools are not supported; use /v1/responses or set reasoning_effort to 'none'."
            return fake.Answer.json({"error": {"message": message}}, 400)
        return fake.vllm([1])(request)

    engine.respond = respond
    proxy.registry.create("evaluated", purpose="eval")
    proxy.registry.create("second", purpose="eval")
    assert Caller(proxy.url, "evaluated").chat(temperature=0.3, tools=TOOLS).status_code == 200
    assert len(engine.requests) == 3
    assert proxy.inference is not None
    assert {str(fix) for fix in proxy.inference.param_fixes} == {"dropped temperature", "set reasoning_effort=none"}
    assert Caller(proxy.url, "second").chat(temperature=0.3, stream=True).status_code == 200
    assert len(engine.requests) == 4  # known by now
    proxy.registry.create("trained", sampling={"temperature": 0.3})
    refused = Caller(proxy.url, "trained").chat(tools=TOOLS)
    assert (refused.status_code, "temperature" in refused.text) == (400, True)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_that_is_too_long_ends_the_rollout_as_a_budget_does(
    proxy: CaptureServer, engine: Any, fake: ModuleType, is_streamed: bool
) -> None:
    session = proxy.registry.create("s1")
    agent = Caller(proxy.url, "s1")
    agent.chat(tools=TOOLS)
    error = {"message": "This model's maximum context length is 4096 tokens; you asked for more", "code": 400}
    engine.respond = lambda request: fake.Answer.json({"error": error}, 400)
    answer = agent.chat(tools=TOOLS, stream=is_streamed)
    assert answer.status_code == 200
    assert "Step budget exhausted" in answer.text
    assert (session.budget_stop_count, session.upstream_errors) == (1, 0)
    document = export_session(session)
    assert document["trainable"]
    assert any("context_budget_exhausted" in finding for finding in document["validation"])
    assert document["stats"]["n_turns"] == 1


def test_an_endpoint_that_speaks_anthropic_messages_answers_agents_that_do(engine: Any, fake: ModuleType) -> None:
    blocks = [{"type": "thinking", "thinking": "so", "signature": "s"}, {"type": "text", "text": "hi"}]
    message = {"type": "message", "id": "1", "model": "m", "role": "assistant", "content": blocks}
    engine.respond = lambda request: fake.Answer.json({**message, "stop_reason": "end_turn", "usage": {}})
    with CaptureServer(llm_url=engine.url, model="m", port=0, provider="anthropic", api_key="k") as proxy:
        session = proxy.registry.create("s1")
        body = {"model": "x", "max_tokens": 9, "messages": QUESTION}
        answer = Caller(proxy.url, "s1")("POST", "/v1/messages", body, **{"anthropic-version": "2023-06-01"})
        assert answer.json()["content"] == blocks
        [node] = session.graph.nodes()
        assert (node.response_message["content"], node.finish_reason) == ("hi", "stop")
        assert export_session(session, capture_level=proxy.capture_level)["rollout_type"] == "eval"
    assert engine.requests[0].headers["x-api-key"] == "k"


NATIVE_EVENTS = [
    {"type": "message_start", "message": {"id": "m1", "role": "assistant", "usage": {"input_tokens": 5}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hel"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
    },
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}},
    {"type": "content_block_stop", "index": 1},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_agents_of_any_dialect_reach_an_endpoint_that_speaks_anthropic_messages(
    engine: Any, fake: ModuleType, is_streamed: bool
) -> None:
    blocks = [{"type": "text", "text": "hello"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]
    usage = {"input_tokens": 5, "output_tokens": 3}
    whole = {"type": "message", "id": "m1", "model": "m", "content": blocks, "stop_reason": "tool_use", "usage": usage}

    def respond(request: Any) -> Any:
        if request.body.get("stream"):
            return fake.Answer.events(*[fake.event(event, event["type"]) for event in NATIVE_EVENTS])
        return fake.Answer.json(whole)

    engine.respond = respond
    with CaptureServer(llm_url=engine.url, model="m", port=0, provider="anthropic", api_key="k") as proxy:
        session = proxy.registry.create("s1")
        agent = Caller(proxy.url, "s1")
        chat = agent.chat(tools=TOOLS, stream=is_streamed, temperature=0.5)
        responses = agent("POST", "/v1/responses", {"model": "x", "input": "hi", "stream": is_streamed})
        action = "streamGenerateContent" if is_streamed else "generateContent"
        google = agent(
            "POST", f"/v1beta/models/x:{action}", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
        )
        refused = agent.chat(response_format={"type": "json_object"})
        nodes = session.graph.nodes()
    for answer in (chat, responses, google):
        assert answer.status_code == 200, answer.text
        assert "hel" in answer.text
        assert "t1" in answer.text
    assert ("data: [DONE]" in chat.text) is is_streamed
    assert (refused.status_code, "response_format" in refused.text) == (400, True)
    sent = engine.requests[0].body
    assert sent["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert (sent["stream"], sent["temperature"], sent["tools"][0]["name"]) == (is_streamed, 0.5, "bash")
    calls = [node.response_message["tool_calls"][0]["function"]["arguments"] for node in nodes]
    assert [json.loads(arguments) for arguments in calls] == [{"a": 1}] * 3


def test_a_session_can_name_its_endpoint_which_is_asked_what_it_names(
    admin: Caller, proxy: CaptureServer, fake: ModuleType
) -> None:
    def respond(request: Any) -> Any:
        if request.method == "GET":
            return fake.Answer.json({"data": [{"id": "only-one"}]})
        if "return_token_ids" in request.body:
            return fake.Answer.json(
                {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}, 400
            )
        return fake.vllm([1])(request)

    with fake.FakeEngine(respond) as other:
        made = admin("POST", "/sessions", {"session_id": "s1", "llm_url": other.url}).json()
        assert (made["capture_level"], made["rollout_type"], made["model"]) == ("logprobs", "eval", "only-one")
        refused = admin("POST", "/sessions", {"llm_url": other.url, "purpose": "train"})
        assert (refused.status_code, "exact engine token capture" in refused.text) == (400, True)
        assert Caller(proxy.url, "s1").chat().status_code == 200
        assert "return_token_ids" not in other.requests[-1].body
        known = admin("GET", "/health").json()["upstreams"]
        assert known == [{"llm_url": other.url, "model": "only-one", "capture_level": "logprobs"}]


def test_keys_of_the_endpoint_stay_in_the_server(engine: Any) -> None:
    with CaptureServer(
        llm_url=engine.url, model="m", port=0, api_key="sk-secret-of-the-endpoint", auth_header="api-key"
    ) as proxy:
        proxy.registry.create("s1")
        Caller(proxy.url, "s1").chat()
        assert engine.requests[0].headers["api-key"] == "sk-secret-of-the-endpoint"
        assert "authorization" not in engine.requests[0].headers
        health = httpx2.get(f"{proxy.url}/health", trust_env=False, verify=False)
        assert "sk-secret" not in health.text
        assert health.json()["upstream_auth"] is True


def test_other_machines_need_an_admin_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="admin key is required"):
        CaptureServer(llm_url="http://127.0.0.1:1", model="m", host="0.0.0.0")
    with pytest.raises(SystemExit):
        main(["--llm-url", "http://127.0.0.1:1", "--host", "0.0.0.0"])
    assert "admin key is required" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(engine: Any) -> None:
    command = [sys.executable, "-m", "openenv.core.harness.capture.server", "--llm-url", engine.url, "--model", "m"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--capture-level", "tokens"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" ")[2].strip()
        admin = Caller(url, "any")
        session_id = admin("POST", "/sessions").json()["session_id"]
        assert Caller(url, session_id).chat(tools=TOOLS).status_code == 200
        assert admin("GET", f"/sessions/{session_id}/rollout").json()["trainable"]
    finally:
        process.terminate()
    assert process.wait(30) == 0


def test_sessions_that_are_not_used_make_room(engine: Any) -> None:
    # The published server keeps sessions, conversations and keys of endpoints for ever.
    with CaptureServer(llm_url=engine.url, model="m", port=0, session_ttl_s=1.5) as proxy:
        used, unused = proxy.registry.create("used"), proxy.registry.create("unused")
        agent = Caller(proxy.url, "used")

        def is_unused_gone() -> bool:
            assert agent.chat().status_code == 200
            return "unused" not in proxy.registry.list_ids()

        wait_until(is_unused_gone, every_s=0.2)
        assert proxy.registry.list_ids() == ["used"]
        assert unused.graph.nodes() == []
        wait_until(
            lambda: httpx2.get(f"{proxy.url}/health", trust_env=False, verify=False) and not proxy.registry.list_ids(),
            every_s=0.1,
        )
        assert used.graph.nodes()  # still there for what holds it
        assert agent.chat().status_code == 401


def test_a_port_that_is_taken_is_an_error(proxy: CaptureServer) -> None:
    other = CaptureServer(llm_url="http://127.0.0.1:1", model="m", port=proxy.port)
    with pytest.raises(RuntimeError, match=str(proxy.port)):
        other.start()


def test_what_was_captured_can_be_read_after_the_server_stopped(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with CaptureServer(llm_url=engine.url, model="m", port=0) as proxy:
        session = proxy.registry.create("s1")
        Caller(proxy.url, "s1").chat(tools=TOOLS)
        [records] = scratch_root().glob("*/s1")
    assert export_session(session)["trainable"]
    assert not records.parent.exists()


@pytest.mark.anyio
async def test_the_application_runs_in_any_asgi_server(engine: Any) -> None:
    app = create_app(llm_url=engine.url, model="m")
    session = app.state.registry.create("s1")
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://proxy") as client:
        headers = {"authorization": "Bearer s1"}
        body = {"model": "m", "messages": QUESTION, "tools": TOOLS}
        whole = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert whole.json()["choices"][0]["message"]["content"] == "t11 t12 t13 "
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await client.get("/sessions/s1")).json()["n_turns"] == 2
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 401
    await app.state.server.on_stop()
    assert [node.sampled_ids for node in session.graph.nodes()] == [[11, 12, 13]] * 2


@pytest.mark.anyio
async def test_the_application_can_be_mounted_in_another(engine: Any) -> None:
    app = create_app(llm_url=engine.url, model="m", admin_key="the-admin-key")
    outer = FastAPI()
    outer.mount("/capture", app)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=outer), base_url="http://host") as client:
        admin = {"authorization": "Bearer the-admin-key"}
        made = await client.post("/capture/sessions", json={"session_id": "s1"}, headers=admin)
        assert made.json()["session_id"] == "s1"
        assert (await client.get("/capture/sessions")).status_code == 401
        answer = await client.post(
            "/capture/v1/messages",
            json={"model": "m", "max_tokens": 5, "messages": QUESTION},
            headers={"x-api-key": "s1"},
        )
        assert answer.json()["type"] == "message"
        assert (await client.get("/capture/sessions/s1", headers=admin)).json()["n_turns"] == 1
    await app.state.server.on_stop()


def test_a_graph_can_be_read_while_calls_are_added(proxy: CaptureServer) -> None:
    session = proxy.registry.create("s1")
    agent = Caller(proxy.url, "s1")
    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(lambda: [export_session(session) for _ in range(40)]) for _ in range(3)]
        for number in range(25):
            agent.chat([{"role": "user", "content": f"call {number}"}], tools=TOOLS)
        assert all(documents.result() for documents in reading)
    assert session.graph.stats()["n_turns"] == 25


def test_the_document_is_plain_json(proxy: CaptureServer) -> None:
    session = proxy.registry.create("s1")
    two_turns(Caller(proxy.url, "s1"))
    assert json.loads(json.dumps(export_session(session, include_messages=True)))["session_id"] == "s1"
