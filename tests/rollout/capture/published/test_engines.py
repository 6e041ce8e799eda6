"""What an endpoint is found to name, and the client that asks one for completions."""

from __future__ import annotations

import asyncio
import json
from types import ModuleType
from typing import Any

import pytest

from openenv.core.harness.capture import InferenceClient, require_llm, validate_llm
from openenv.core.harness.capture.upstream import UpstreamHTTPError, UpstreamRequestError, UpstreamTransportError
from openenv.core.harness.capture.validate_llm import list_models, probe_logprobs_mode, probe_tool_support

QUESTION = {"model": "agents", "messages": [{"role": "user", "content": "hi"}]}
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}


class Endpoint:
    """A model endpoint with the habits that a test gives it."""

    def __init__(self, fake: ModuleType) -> None:
        self._fake = fake
        self.refused: dict[str, str] = {}
        """Parameters, and what is said where a request has them."""
        self.ids = self.logprobs = self.tools = True
        self.is_raw = False
        self.models: list[str] | None = ["m"]

    def __call__(self, request: Any) -> Any:
        answer = self._fake.Answer.json
        if request.method == "GET":
            if self.models is None:
                return answer({}, 404)
            return answer({"data": [{"id": name} for name in self.models]})
        for name, message in self.refused.items():
            if name in request.body:
                return answer({"error": {"message": message}}, 400)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "ok"},
        }
        if request.body.get("tools") and self.tools:
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
        if request.body.get("logprobs") and self.logprobs:
            temperature = request.body.get("temperature") or 1.0
            gap = 3.0 if self.is_raw else 3.0 / temperature
            tops = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.1 - gap}]
            choice["logprobs"] = {"content": [{"token": "token_id:5", "logprob": -0.1, "top_logprobs": tops}]}
        whole: dict[str, Any] = {"id": "c", "choices": [choice], "usage": {}}
        if request.body.get("return_token_ids") and self.ids:
            whole["prompt_token_ids"], choice["token_ids"] = [1, 2], [5]
        return answer(whole)


@pytest.fixture
def endpoint(engine: Any, fake: ModuleType) -> Endpoint:
    habits = Endpoint(fake)
    engine.respond = habits
    return habits


def test_an_endpoint_to_train_with(engine: Any, endpoint: Endpoint) -> None:
    report = validate_llm(engine.url, "m")
    assert (report.ok, report.capture_level, report.rollout_type) == (True, "tokens", "train")
    assert (report.n_prompt_ids, report.n_completion_ids) == (2, 1)
    assert (report.tool_support, report.logprobs_mode, report.findings) == ("ok", "processed", [])
    assert report.summary() == "engine OK: 1 completion ids, 2 prompt ids"
    assert require_llm(engine.url, "m", require_tokens=True).ok


def test_logprobs_from_before_temperature_are_not_trained_with(
    engine: Any, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.is_raw = True
    report = validate_llm(engine.url, "m")
    assert (report.ok, report.capture_level, report.logprobs_mode) == (False, "logprobs", "raw")
    assert any("[FATAL] raw_logprobs" in finding for finding in report.findings)
    with pytest.raises(RuntimeError, match="EVAL ONLY"):
        require_llm(engine.url, "m", require_tokens=True)
    monkeypatch.setenv("OPENENV_ALLOW_RAW_LOGPROBS", "1")
    assert validate_llm(engine.url, "m").ok


def test_parameters_that_an_endpoint_turns_down_decide_the_level(engine: Any, endpoint: Endpoint) -> None:
    endpoint.refused = {
        "return_token_ids": "Unrecognized request argument supplied: return_token_ids",
        "logprobs": "Unsupported parameter: 'logprobs' is not supported with this model.",
        "max_tokens": "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
        "temperature": "Unsupported value: 'temperature' does not support 0 with this model.",
    }
    report = validate_llm(engine.url, "m")
    assert (report.reachable, report.capture_level) == (True, "text")
    assert set(report.param_fixes) == {
        "dropped return_token_ids",
        "dropped logprobs",
        "renamed max_tokens -> max_completion_tokens",
        "dropped temperature",
    }
    assert any("behaviour_changed: temperature" in finding for finding in report.findings)
    assert "EVAL ONLY" in report.summary()


@pytest.mark.parametrize(("habit", "level"), [("ids", "logprobs"), ("logprobs", "text")])
def test_what_an_endpoint_does_not_name_decides_the_level(
    engine: Any, endpoint: Endpoint, habit: str, level: str
) -> None:
    setattr(endpoint, habit, False)
    assert validate_llm(engine.url, "m", check_tools=False).capture_level == level


def test_a_model_that_calls_no_tools_is_reported(engine: Any, endpoint: Endpoint) -> None:
    endpoint.tools = False
    assert probe_tool_support(engine.url, "m") == ("no-tool-call", [])
    assert any("no_tool_call_emitted" in finding for finding in validate_llm(engine.url, "m").findings)
    endpoint.refused = {"tools": "tools are for others"}
    assert probe_tool_support(engine.url, "m")[0] == "rejected"


def test_an_endpoint_that_does_not_answer(engine: Any, endpoint: Endpoint) -> None:
    nowhere = "http://127.0.0.1:1"
    report = validate_llm(nowhere, "m", timeout=2)
    assert (report.ok, report.reachable) == (False, False)
    assert "NOT reachable" in report.summary()
    with pytest.raises(RuntimeError, match="NOT reachable"):
        require_llm(nowhere, "m", timeout=2)
    assert list_models(nowhere, 2) == []
    assert probe_logprobs_mode(nowhere, "m", timeout=2) == "unknown"
    assert probe_tool_support(nowhere, "m", timeout=2) == ("unknown", [])
    assert list_models(engine.url) == ["m"]
    unknown = validate_llm(engine.url, "other")
    assert (unknown.reachable, unknown.served_models) == (False, ["m"])
    with pytest.raises(ValueError, match="Unknown upstream provider"):
        validate_llm(engine.url, "m", provider="other")


def test_an_endpoint_that_speaks_anthropic_messages(engine: Any, fake: ModuleType) -> None:
    blocks = [{"type": "tool_use", "id": "1", "name": "report_ok", "input": {"value": "ok"}}]
    message = {"type": "message", "id": "1", "model": "m", "content": blocks, "stop_reason": "tool_use"}
    engine.respond = lambda request: fake.Answer.json(message)
    report = validate_llm(engine.url, "m", provider="anthropic", api_key="k")
    assert (report.reachable, report.capture_level, report.tool_support) == (True, "text", "ok")
    request = engine.requests[0]
    assert (request.path, request.headers["x-api-key"]) == ("/v1/messages", "k")
    client = InferenceClient(engine.url, served_model="m", api_key="k", provider="anthropic")
    answer = asyncio.run(client.completion(QUESTION))
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "report_ok"
    assert engine.requests[-1].body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with pytest.raises(UpstreamRequestError, match="response_format"):
        asyncio.run(client.completion({**QUESTION, "response_format": {"type": "json_object"}}))


def test_a_client_learns_what_the_endpoint_turns_down(engine: Any, endpoint: Endpoint) -> None:
    endpoint.refused = {"return_token_ids": "Unknown parameter: 'return_token_ids'."}
    client = InferenceClient(engine.url, served_model="m", api_key="k")

    async def two_calls() -> list[Any]:
        answers = [await client.completion({**QUESTION, "top_p": 0.5}), await client.completion(QUESTION)]
        await client.aclose()
        return answers

    first, _ = asyncio.run(two_calls())
    assert first["choices"][0]["message"]["content"] == "ok"
    assert [str(fix) for fix in client.param_fixes] == ["dropped return_token_ids"]
    bodies = [request.body for request in engine.requests]
    assert ["return_token_ids" in body for body in bodies] == [True, False, False]
    assert (bodies[0]["model"], bodies[0]["top_p"], bodies[0]["top_logprobs"]) == ("m", 1.0, 0)
    assert engine.requests[0].headers["authorization"] == "Bearer k"


def test_a_client_says_why_there_is_no_answer(engine: Any, fake: ModuleType) -> None:
    client = InferenceClient(engine.url)
    engine.respond = lambda request: fake.Answer.json({"error": {"message": "no"}}, 404)
    with pytest.raises(UpstreamHTTPError, match="upstream returned 404: no") as caught:
        asyncio.run(client.completion(QUESTION))
    assert (caught.value.status_code, caught.value.body) == (404, {"error": {"message": "no"}})
    engine.respond = lambda request: fake.Answer.json([], 200)
    with pytest.raises(UpstreamTransportError):
        asyncio.run(client.list_models())
    with pytest.raises(UpstreamTransportError, match="could not reach"):
        asyncio.run(InferenceClient("http://127.0.0.1:1").completion(QUESTION))
    with pytest.raises(ValueError, match="unknown upstream provider"):
        InferenceClient(engine.url, provider="other")


def test_a_client_waits_as_long_as_it_is_asked_to(engine: Any, fake: ModuleType) -> None:
    answers = iter([fake.Answer.json({}, 429, retry_after="0"), fake.Answer.json({"choices": []})])
    engine.respond = lambda request: next(answers)
    assert asyncio.run(InferenceClient(engine.url).completion(QUESTION)) == {"choices": []}
    assert json.loads(json.dumps(engine.requests[1].body)) == engine.requests[0].body
