"""What a scripted model puts on the wire: labels, the shapes of engines, failures, its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import openenv
from openenv.testing import (
    CutFailure,
    HangFailure,
    Script,
    ScriptedCall,
    ScriptedModel,
    StatusFailure,
    Turn,
    load_scripts,
)
from openenv.testing.scripted import vocabulary
from openenv.testing.scripted.__main__ import main

Start = Callable[..., ScriptedModel]
Speak = Callable[..., Any]

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def talk(*turns: Turn) -> Script:
    return Script(name="talk", turns=turns)


def test_every_reply_says_that_it_is_scripted(scripted: Start, http: httpx2.Client) -> None:
    model = scripted(talk(Turn(text="hello")))
    assert model.name == "scripted/talk"
    assert model.model("talk") == {"base_url": model.url, "name": "scripted/talk"}
    assert model.url.endswith("/v1")
    models = http.get(f"{model.url}/models")
    assert [(one["id"], one["owned_by"]) for one in models.json()["data"]] == [("scripted/talk", "scripted")]
    reply = http.post(f"{model.url}/chat/completions", json={"model": model.name, **HELLO})
    for response in (models, reply, http.get(f"{model.root_url}/health"), http.get(f"{model.url}/nowhere")):
        assert response.headers["x-openenv-model"] == "scripted"
    with pytest.raises(KeyError, match="no script"):
        model.model("other")


def test_ids_stand_where_each_engine_puts_them(scripted: Start, http: httpx2.Client) -> None:
    body = {"model": "x", **HELLO, "return_token_ids": True}
    for engine in ("vllm", "sglang", "plain"):
        model = scripted(talk(Turn(text="hello")), engine=engine)
        reply = http.post(f"{model.url}/chat/completions", json=body).json()
        choice = reply["choices"][0]
        assert ("prompt_token_ids" in reply) is (engine == "vllm")
        assert ("prompt_token_ids" in choice) is (engine == "sglang")
        assert ("token_ids" in choice) is (engine != "plain")
        bare = http.post(f"{model.url}/chat/completions", json={"model": "x", **HELLO}).json()
        assert "token_ids" not in bare["choices"][0]
        assert bare["choices"][0]["logprobs"] is None


def test_log_probabilities_have_openais_shape(scripted: Start, http: httpx2.Client) -> None:
    model = scripted(talk(Turn(text="für the")))
    body = {"model": "x", **HELLO, "logprobs": True, "top_logprobs": 4, "return_token_ids": True}
    choice = http.post(f"{model.url}/chat/completions", json=body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "für the<|end|>".encode()
    assert len(entries) == len(choice["token_ids"])
    for entry in entries:
        chances = [other["logprob"] for other in entry["top_logprobs"]]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 4
        assert entry["token"] == entry["top_logprobs"][0]["token"]
    named = http.post(f"{model.url}/chat/completions", json={**body, "return_tokens_as_token_ids": True}).json()
    tokens = [entry["token"] for entry in named["choices"][0]["logprobs"]["content"]]
    assert tokens == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_streams_text_is_never_half_a_character(scripted: Start, speak: Speak) -> None:
    agent = speak(scripted(talk(Turn(text="naïve — 😀"))))
    agent.say("talk")
    reply = agent.ask()
    assert reply.text == "naïve — 😀"
    assert all("�" not in json.dumps(event["choices"], ensure_ascii=False) for event in _without_logprobs(reply.events))


def _without_logprobs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for event in events:
        for choice in event["choices"]:
            choice.pop("logprobs", None)
    return events


def test_usage_counts_the_tokens(scripted: Start, speak: Speak) -> None:
    agent = speak(scripted(talk(Turn(text="hello you"))))
    agent.say("talk")
    reply = agent.try_ask(stream_options={"include_usage": True})
    usage = reply.events[-1]["usage"]
    assert usage["prompt_tokens"] == len(reply.prompt_ids)
    assert usage["completion_tokens"] == len(reply.token_ids)


def test_a_chunk_has_several_tokens_if_configured(scripted: Start, speak: Speak) -> None:
    replies = []
    for size in (1, 8):
        agent = speak(scripted(talk(Turn(text="many words " * 10)), tokens_per_chunk=size))
        agent.say("talk")
        replies.append(agent.ask())
    assert replies[0].token_ids == replies[1].token_ids
    assert len(replies[1].events) < len(replies[0].events) / 4


def test_a_status_failure_comes_as_often_as_it_says(scripted: Start, speak: Speak) -> None:
    failures = (StatusFailure(status=429, retry_after_s=0.5), StatusFailure(status=503, attempts=2))
    agent = speak(scripted(talk(Turn(text="at last", failures=failures))))
    agent.say("talk")
    answers = []
    for _ in range(3):
        with pytest.raises(httpx2.HTTPStatusError) as caught:
            agent.try_ask()
        answers.append((caught.value.response.status_code, caught.value.response.headers.get("retry-after")))
    assert answers == [(429, "0.5"), (503, None), (503, None)]
    assert agent.ask().text == "at last"
    other = speak(scripted(talk(Turn(text="never", failures=(StatusFailure(attempts=None),)))), "anthropic")
    other.say("talk")
    for _ in range(3):
        with pytest.raises(httpx2.HTTPStatusError, match="500"):
            other.try_ask()


def test_failures_are_counted_per_conversation(scripted: Start, speak: Speak) -> None:
    model = scripted(talk(Turn(text="yes", failures=(StatusFailure(),))))
    for task in ("a", "b"):
        agent = speak(model)
        agent.say(task)
        with pytest.raises(httpx2.HTTPStatusError):
            agent.try_ask()
        assert agent.ask().text == "yes"


@pytest.mark.parametrize("stream", [True, False])
def test_a_cut_connection_is_an_error_at_the_client(scripted: Start, speak: Speak, stream: bool) -> None:
    model = scripted(talk(Turn(text="one two three four five six", failures=(CutFailure(after_chunks=4),))))
    agent = speak(model, stream=stream)
    agent.say("talk")
    with pytest.raises(httpx2.RemoteProtocolError):
        agent.try_ask()
    assert agent.ask().text == "one two three four five six"
    cut, whole = model.played()
    assert (cut.finished, whole.finished) == (False, True)
    assert cut.token_ids == whole.token_ids[: 3 if stream else 0]
    assert len(cut.logprobs) == len(cut.token_ids)


def test_a_hang_ends_when_the_caller_leaves_or_the_server_stops(scripted: Start) -> None:
    hang = HangFailure(after_chunks=2, attempts=None)
    model = scripted(talk(Turn(text="one two three", failures=(hang,))))
    with httpx2.Client(timeout=0.5, trust_env=False) as impatient, pytest.raises(httpx2.ReadTimeout):
        impatient.post(f"{model.url}/chat/completions", json={"model": "x", "stream": True, **HELLO})
    stuck = httpx2.Client(timeout=30, trust_env=False)
    with stuck.stream(
        "POST", f"{model.url}/chat/completions", json={"model": "x", "stream": True, **HELLO}
    ) as response:
        assert response.status_code == 200
        began = time.monotonic()
        model.close()
        assert time.monotonic() - began < 30
    stuck.close()
    assert [one.finished for one in model.played()] == [False, False]


def test_a_short_hang_only_delays(scripted: Start, speak: Speak) -> None:
    for stream in (True, False):
        agent = speak(scripted(talk(Turn(text="late", failures=(HangFailure(seconds=0.05),)))), stream=stream)
        agent.say("talk")
        assert agent.ask().text == "late"


def test_bad_requests_are_refused_in_the_shape_of_the_dialect(scripted: Start, http: httpx2.Client) -> None:
    model = scripted()
    assert http.post(f"{model.url}/chat/completions", content=b"{").status_code == 400
    assert http.post(f"{model.url}/chat/completions", json=[]).status_code == 400
    refused = http.post(f"{model.url}/messages", json={"messages": [{"role": "robot", "content": "x"}]})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert http.post(f"{model.url}/responses", json={"input": 3}).status_code == 400
    assert http.post(f"{model.url}/chat/completions", json={**HELLO, "n": 2}).status_code == 400
    odd = {"messages": [{"role": "assistant", "tool_calls": ["no call"]}]}
    assert "cannot be understood" in http.post(f"{model.url}/chat/completions", json=odd).json()["error"]["message"]
    assert http.head(f"{model.root_url}/").status_code == 200
    again = http.post(f"{model.url}/responses", json={"input": "x", "previous_response_id": "r"})
    assert "no conversation is kept" in again.json()["error"]["message"]
    assert http.post(f"{model.url}/embeddings", json={}).status_code == 404


def test_a_key_is_required_when_one_is_set(scripted: Start, http: httpx2.Client) -> None:
    model = scripted(api_key="secret")
    body = {"model": "x", **HELLO}
    assert http.post(f"{model.url}/chat/completions", json=body).status_code == 401
    for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        assert http.post(f"{model.url}/chat/completions", json=body, headers=headers).status_code == 200


def test_headers_such_as_a_policys_version_can_change(scripted: Start, http: httpx2.Client) -> None:
    model = scripted()
    model.set_header("X-Policy-Version", "1")
    versions = [http.get(f"{model.url}/models").headers["x-policy-version"]]
    model.set_header("X-Policy-Version", "2")
    versions.append(http.get(f"{model.url}/models").headers["x-policy-version"])
    assert versions == ["1", "2"]


def test_tokens_can_be_counted_and_turned_back_into_text(scripted: Start, speak: Speak, http: httpx2.Client) -> None:
    model = scripted()
    agent = speak(model, "anthropic")
    agent.say("please work")
    reply = agent.try_ask()
    body = {"model": "x", "messages": agent.history, "tools": agent.tools}
    counted = http.post(f"{model.url}/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(reply.prompt_ids)}
    ids = http.post(f"{model.root_url}/tokenize", json={"prompt": "the file ü"}).json()["tokens"]
    assert http.post(f"{model.root_url}/detokenize", json={"tokens": ids}).json() == {"prompt": "the file ü"}
    assert http.post(f"{model.root_url}/detokenize", json={"tokens": [10**9]}).status_code == 400
    chat = {"messages": HELLO["messages"]}
    assert http.post(f"{model.root_url}/tokenize", json=chat).json()["tokens"][0] == vocabulary.BEGIN


def test_a_free_form_tool_is_called_as_codex_wants_it(scripted: Start, http: httpx2.Client) -> None:
    patch = ScriptedCall(name="apply_patch", arguments="*** Begin Patch\n*** End Patch")
    model = scripted(Script(turns=(Turn(calls=(patch,)), Turn(text="patched"))))
    body = {"model": "x", "input": "patch it", "tools": [{"type": "custom", "name": "apply_patch"}]}
    item = http.post(f"{model.url}/responses", json=body).json()["output"][0]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin Patch\n*** End Patch")
    done = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    items = [{"role": "user", "content": "patch it"}, item, {"type": "reasoning", "summary": []}, done]
    reply = http.post(f"{model.url}/responses", json={**body, "input": items}).json()
    assert reply["output"][0]["content"][0]["text"] == "patched"


def test_a_port_that_is_taken_is_an_error(scripted: Start) -> None:
    model = scripted()
    with pytest.raises(OSError, match="in use"):
        ScriptedModel(talk(), port=model.port)


def test_scripts_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "scripts:\n"
        "- name: scripted/a\n"
        "  turns:\n"
        "  - text: hi\n"
        "    calls: [{name: run, arguments: {x: 1}}]\n"
        "    failures: [{kind: status, status: 429}, {kind: hang, seconds: 1}]\n"
        "- {name: b, key: bees}\n"
    )
    one, two = load_scripts(file)
    assert (one.model_name, one.turns[0].calls[0].arguments, two.key) == ("scripted/a", {"x": 1}, "bees")
    assert isinstance(one.turns[0].failures[1], HangFailure)
    assert load_scripts(json.loads(one.model_dump_json())) == (one,)
    with pytest.raises(ValueError, match="same name"):
        load_scripts([one, one])
    with pytest.raises(ValueError, match="needs a script"):
        load_scripts([])
    with pytest.raises(ValueError, match="extra"):
        load_scripts({"name": "a", "turn": []})
    with pytest.raises(ValueError, match="letters"):
        load_scripts({"name": "a b"})


def test_it_runs_as_a_process_and_stops_on_a_signal(tmp_path: Path, http: httpx2.Client) -> None:
    file = tmp_path / "script.json"
    file.write_text(talk(Turn(text="from a process")).model_dump_json())
    environment = {**os.environ, "PYTHONPATH": str(Path(openenv.__file__).parents[1])}
    command = [sys.executable, "-m", "openenv.testing.scripted", str(file), "--engine", "sglang"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[6].rstrip(":")
        assert "no real one" in line
        reply = http.post(f"{url}/chat/completions", json={"model": "scripted/talk", **HELLO}).json()
        assert reply["choices"][0]["message"]["content"] == "from a process"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    refused = subprocess.run(
        [*command[:3], "missing.yaml"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "missing.yaml" in refused.stderr


def test_a_ready_script_that_does_not_exist_is_reported_with_the_one_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["opencode:nothing"])
    assert stop.value.code == 2
    assert "there is no ready script 'nothing', only opencode:binary_search" in capsys.readouterr().err
