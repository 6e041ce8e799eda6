"""Agents that speak Google's `generateContent`: what the endpoint gets, what they see, what is recorded."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import httpx2
import pytest

from openenv.rollout.capture import CaptureServer
from openenv.rollout.capture.dialects import AGENT_DIALECTS, BRIDGES, route
from openenv.rollout.capture.dialects.google import request as as_chat
from openenv.rollout.tasks.model_parameters import allow
from openenv.rollout.tasks.task import Budget, Model

CALL = "/v1beta/models/gemini-2.5-pro:generateContent"
STREAM = "/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse"
QUESTION = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


def post(server: CaptureServer, path: str, body: Any, **headers: str) -> httpx2.Response:
    with httpx2.Client(base_url=server.url, timeout=20, trust_env=False, verify=False) as client:
        return client.post(path, json=body, headers=headers)


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def parts(answer: Any) -> list[Any]:
    found: list[Any] = answer["candidates"][0]["content"]["parts"]
    return found


def test_a_call_reaches_a_chat_endpoint_and_is_recorded_token_by_token(server: CaptureServer, engine: Any) -> None:
    config = {"temperature": 0.1, "maxOutputTokens": 50, "topP": 0.5}
    system = {"parts": [{"text": "be brief"}]}
    body = {**QUESTION, "systemInstruction": system, "generationConfig": config}
    with server.open("r1", Model(base_url=engine.url, name="m", sampling={"temperature": 1.0})) as capture:
        answer = post(server, CALL, body, **{"x-goog-api-key": capture.key}).json()
        [call] = capture.calls()
    assert parts(answer) == [{"text": "t11 t12 t13 "}]
    assert answer["candidates"][0]["finishReason"] == "STOP"
    assert answer["usageMetadata"] == {"promptTokenCount": 5, "candidatesTokenCount": 3, "totalTokenCount": 8}
    assert answer["modelVersion"] == "gemini-2.5-pro"
    sent = engine.requests[0].body
    assert sent["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["top_p"]) == ("m", 50, 1.0, 1.0)
    assert (call.dialect, call.endpoint_dialect) == ("google", "openai_chat")
    assert set(call.removed) == {"generationConfig.temperature", "generationConfig.topP"}
    assert call.completion.sampled.ids == (11, 12, 13)
    assert not call.not_trainable


def test_a_stream_comes_as_googles_events_while_the_model_speaks(server: CaptureServer, engine: Any) -> None:
    with server.open("r1", Model(base_url=engine.url, name="m")) as capture:
        answer = post(server, STREAM, QUESTION, **{"x-goog-api-key": capture.key})
        [call] = capture.calls()
    assert answer.headers["content-type"].startswith("text/event-stream")
    received = events(answer.text)
    assert [part["text"] for event in received for part in parts(event)] == ["t11 ", "t12 ", "t13 "]
    assert received[-1]["candidates"][0]["finishReason"] == "STOP"
    assert received[-1]["usageMetadata"]["candidatesTokenCount"] == 3
    assert call.streamed
    assert engine.requests[0].body["stream"] is True


def test_tools_and_thoughts_go_both_ways(server: CaptureServer, engine: Any, fake: ModuleType) -> None:
    def respond(request: Any) -> Any:
        call = {"id": "c1", "index": 0, "function": {"name": "ls", "arguments": '{"path": '}}
        rest = {"index": 0, "function": {"arguments": '"/"}'}}
        chunks = [{"reasoning_content": "hm"}, {"content": "look: "}, {"tool_calls": [call]}, {"tool_calls": [rest]}]
        pieces = [fake.event(fake.chat_chunk(chunk)) for chunk in chunks]
        return fake.Answer.events(*pieces, fake.event(fake.chat_chunk({}, finish="tool_calls")), fake.DONE)

    engine.respond = respond
    declared = {"functionDeclarations": [{"name": "ls", "description": "list", "parameters": {"type": "OBJECT"}}]}
    body = {**QUESTION, "tools": [declared, {"googleSearch": {}}]}
    with server.open("r1", Model(base_url=engine.url, name="m")) as capture:
        answer = post(server, STREAM, body, **{"x-goog-api-key": capture.key})
    thought, text, call = [part for event in events(answer.text) for part in parts(event)]
    assert (thought["thought"], thought["text"], bool(thought["thoughtSignature"])) == (True, "hm", True)
    assert text == {"text": "look: "}
    assert call == {"functionCall": {"name": "ls", "args": {"path": "/"}, "id": "c1"}}
    function = engine.requests[0].body["tools"]
    assert [tool["function"]["name"] for tool in function] == ["ls"]


def test_results_find_their_calls_also_without_ids() -> None:
    contents = [
        {"role": "user", "parts": [{"text": "go"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}]},
        {
            "role": "model",
            "parts": [
                {"thought": True, "text": "hm"},
                {"functionCall": {"name": "ls", "args": {"a": 1}}},
                {"functionCall": {"name": "ls", "args": {"a": 2}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "ls", "response": {"out": 1}}},
                {"functionResponse": {"name": "ls", "response": {"out": 2}}},
            ],
        },
    ]
    user, model, first, second = as_chat({"contents": contents})["messages"]
    assert [part["type"] for part in user["content"]] == ["text", "image_url"]
    assert [call["id"] for call in model["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert first["tool_call_id"] != second["tool_call_id"]
    assert (model["content"], json.loads(second["content"])) == ("", {"out": 2})


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY"}, "required"),
        ({"mode": "ANY", "allowedFunctionNames": ["f"]}, {"type": "function", "function": {"name": "f"}}),
        ({"mode": "AUTO"}, None),
    ],
)
def test_a_forced_tool_is_seen_as_one(config: Any, choice: Any) -> None:
    body = {
        **QUESTION,
        "tools": [{"functionDeclarations": [{"name": "f"}]}],
        "toolConfig": {"functionCallingConfig": config},
    }
    assert as_chat(body).get("tool_choice") == choice


def test_a_format_is_not_the_agents_to_decide() -> None:
    config = {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}, "maxOutputTokens": 5}
    body = {**QUESTION, "generationConfig": config, "config": {"temperature": 0}}
    allowed = allow("google", body)
    assert allowed.body["generationConfig"] == {"maxOutputTokens": 5}
    assert set(allowed.removed) == {"config", "generationConfig.responseMimeType", "generationConfig.responseSchema"}
    assert as_chat(body)["response_format"]["json_schema"]["schema"] == {"type": "OBJECT"}


def test_the_budget_and_errors_speak_googles_dialect(server: CaptureServer, engine: Any, fake: ModuleType) -> None:
    with server.open("r1", Model(base_url=engine.url, name="m"), budget=Budget(max_calls=2)) as capture:
        key = {"x-goog-api-key": capture.key}
        engine.respond = lambda request: fake.Answer.json({"error": {"message": "too long"}}, 400)
        refused = post(server, CALL, QUESTION, **key)
        assert (refused.status_code, refused.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
        several = post(server, CALL, {**QUESTION, "generationConfig": {"candidateCount": 2}}, **key)
        assert (several.status_code, "n must be 1" in several.text) == (400, True)
        engine.respond = fake.vllm([1])
        assert post(server, f"{CALL}?key={capture.key}", QUESTION).status_code == 200
        last = events(post(server, STREAM, QUESTION, **key).text)
        assert parts(last[0]) == [{"text": "Step budget exhausted; stopping."}]
        count = post(server, CALL.replace("generateContent", "countTokens"), QUESTION, **key).json()
        assert count["totalTokens"] == 1
        models = httpx2.get(f"{server.url}/v1beta/models", headers=key, trust_env=False, verify=False).json()
        assert models["models"][0]["name"] == "models/m"
    assert post(server, CALL, QUESTION, **key).json()["error"]["status"] == "UNAUTHENTICATED"


def test_paths_are_read_whatever_their_case_and_prefix() -> None:
    google = AGENT_DIALECTS["google"]
    for path, kind in ((CALL, "call"), (CALL.lower(), "call"), ("/x/v1/models/m:countTokens", "count")):
        target = route(path)
        assert target is not None
        assert (target.dialect, target.kind) == (google, kind)
    assert route("/v1beta/models/m:embedContent") is None
    assert google.read(CALL, {}) == {"stream": False, "model": "gemini-2.5-pro"}
    assert ("google", "openai_chat") in BRIDGES


def test_a_broken_stream_ends_with_googles_error(server: CaptureServer, engine: Any, fake: ModuleType) -> None:
    engine.respond = lambda request: fake.Answer.events(fake.event(fake.chat_chunk({"content": "half"})), None)
    with server.open("r1", Model(base_url=engine.url, name="m")) as capture:
        with httpx2.Client(base_url=server.url, timeout=20, trust_env=False, verify=False) as client:
            received = b""
            with (
                pytest.raises(httpx2.RemoteProtocolError),
                client.stream("POST", STREAM, json=QUESTION, headers={"x-goog-api-key": capture.key}) as answer,
            ):
                for piece in answer.iter_raw():
                    received += piece
        [call] = capture.calls()
    assert events(received.decode())[-1]["error"]["code"] == 502
    assert call.ended == "broken"
