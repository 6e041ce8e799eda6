"""The proxy that is put into sandboxes: what the model is asked, what the agent sees, what is recorded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from opencode_env.sandbox import interception
from opencode_env.sandbox.interception import (
    InterceptionProxy,
    ProxyConfig,
    Recording,
    read_trace,
    rewrite_request,
    stripped,
    without_refused,
)
from openenv.testing import CutFailure, Script, ScriptedCall, ScriptedModel, StatusFailure, Turn
from waiting import wait_until

Play = Callable[..., ScriptedModel]
TALK = Script(name="talk", turns=(Turn(text="one two three four five"),))
CALL = Script(name="call", turns=(Turn(text="look", calls=(ScriptedCall(name="bash", arguments={"command": "ls"}),)),))
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "trace.jsonl"


@pytest.fixture
def proxied(play: Play, trace: Path) -> Iterator[Callable[..., httpx2.Client]]:
    """Clients of a proxy that stands before a scripted model."""
    stack: list[Any] = []

    def start(script: Script, engine: str = "vllm", **options: Any) -> httpx2.Client:
        model = play(script, engine=engine, api_key="sk-real")
        config = ProxyConfig(
            upstream_url=model.root_url,
            upstream_api_key="sk-real",
            trace=trace,
            port=0,
            model_override=model.name,
            **options,
        )
        proxy = InterceptionProxy(config)
        proxy.__enter__()
        client = httpx2.Client(base_url=proxy.url, timeout=20, trust_env=False)
        stack.extend((proxy, client))
        return client

    yield start
    for one in reversed(stack):
        one.__exit__(None, None, None)


def ask(client: httpx2.Client, **more: Any) -> httpx2.Response:
    body = {"model": "x", "messages": [{"role": "user", "content": "hello"}], **more}
    return client.post("/chat/completions", json=body)


def settled(trace: Path, count: int = 1) -> list[dict[str, Any]]:
    """The records, once so many are there: each is written when its call has ended."""
    wait_until(lambda: len(read_trace(trace)) >= count, 10, lambda: read_trace(trace))
    return read_trace(trace)


# -- requests -------------------------------------------------------------------------------------------------------

CONFIG = ProxyConfig(upstream_url="http://host")


def test_log_probabilities_and_ids_are_asked_for_whatever_the_agent_says() -> None:
    made = rewrite_request({"model": "m", "logprobs": False}, CONFIG)
    assert (made["logprobs"], made["top_logprobs"], made["return_token_ids"]) == (True, 5, True)
    assert rewrite_request({"top_logprobs": 2}, CONFIG)["top_logprobs"] == 2


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ({"max_tokens": 900}, {"max_tokens": 100}),
        ({"max_tokens": 50}, {"max_tokens": 50}),
        ({}, {"max_tokens": 100}),
        ({"model": "gpt-5-mini", "max_tokens": 900}, {"max_completion_tokens": 100}),
        ({"model": "o3", "max_completion_tokens": 7}, {"max_completion_tokens": 7}),
        ({"model": "o4-mini"}, {"max_completion_tokens": 100}),
        ({"max_tokens": "900"}, {"max_tokens": 100}),
        ({"max_tokens": -1, "n_predict": 900}, {"max_tokens": 100}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 10, "max_completion_tokens": 900}, {"max_completion_tokens": 100}),
    ],
)
def test_the_cap_holds_under_either_name(body: dict[str, Any], made: dict[str, Any]) -> None:
    rewritten = rewrite_request(body, ProxyConfig(upstream_url="http://host", max_tokens_cap=100))
    assert {key: value for key, value in rewritten.items() if key.startswith("max_")} == made


def test_the_model_is_asked_not_to_think_and_under_another_name() -> None:
    config = ProxyConfig(upstream_url="http://host", disable_thinking=True, model_override="Qwen/Q")
    made = rewrite_request({"model": "m", "chat_template_kwargs": {"x": 1}}, config)
    assert (made["model"], made["chat_template_kwargs"]) == ("Qwen/Q", {"enable_thinking": False})


def test_the_agent_decides_what_is_asked_and_not_how_it_is_sampled() -> None:
    asked = {"messages": [{"role": "user", "content": "hi", "prefix": True}], "stream": True}
    steered = {"temperature": 0, "logit_bias": {"1": 100}, "guided_regex": "x", "n": 8, "seed": 1, "stop": ["x"]}
    config = ProxyConfig(upstream_url="http://host", sampling={"temperature": 0.7, "top_p": 1})
    made = rewrite_request({**asked, **steered}, config)
    assert made.pop("messages") == [{"role": "user", "content": "hi"}]
    assert set(made) == {"stream", "temperature", "top_p", "logprobs", "top_logprobs", "return_token_ids"}
    assert made["temperature"] == 0.7
    with pytest.raises(ValueError, match="messages"):
        ProxyConfig(upstream_url="http://host", sampling={"messages": []})


def test_a_turn_with_a_forced_tool_is_recorded_as_one_that_is_not_trained_on(
    proxied: Callable[..., httpx2.Client], trace: Path
) -> None:
    client = proxied(TALK)
    ask(client)
    ask(client, tools=TOOLS, tool_choice="required", temperature=0)
    free, forced = settled(trace, 2)
    assert "not_trainable" not in free
    assert forced["not_trainable"] == ["tool_choice: forced tool"]
    assert "temperature" not in forced["request"]


@pytest.mark.parametrize("base", ["http://host", "http://host/", "http://host/v1", "http://host/v1/"])
def test_the_version_is_in_the_address_once(base: str) -> None:
    assert ProxyConfig(upstream_url=base).completions_url == "http://host/v1/chat/completions"


def test_only_what_the_proxy_added_is_left_out_when_it_is_refused() -> None:
    body = {"messages": [], "logprobs": True, "top_logprobs": 5, "return_token_ids": True}
    once = without_refused(body, "unknown parameter: return_token_ids")
    assert once == {"messages": [], "logprobs": True, "top_logprobs": 5}
    assert without_refused(once, "logprobs are not supported") == {"messages": []}
    assert without_refused({"messages": []}, "messages must not be empty") is None


def test_sampling_without_effect_is_left_out_when_it_is_refused() -> None:
    body = {"messages": [], "min_p": 0.0, "top_k": 20}
    assert without_refused(body, "Extra inputs are not permitted: min_p") == {"messages": [], "top_k": 20}
    assert without_refused(body, "Extra inputs are not permitted: top_k") is None


# -- replies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_agent_sees_the_answer_and_the_trace_has_its_tokens(
    proxied: Callable[..., httpx2.Client], trace: Path, engine: str, streamed: bool
) -> None:
    reply = ask(proxied(TALK, engine), stream=streamed)
    assert reply.status_code == 200
    text = "".join(re.findall(r'"content": ?"([^"]*)"', reply.text))
    assert text == "one two three four five"
    assert "logprob" not in reply.text.replace('"logprobs":null', "").replace('"logprobs": null', "")
    assert "token_ids" not in reply.text
    assert ("data: [DONE]" in reply.text) is streamed
    [record] = settled(trace)
    assert (record["turn"], record["finish_reason"], record["upstream_status"]) == (1, "stop", 200)
    assert record["response"]["choices"][0]["message"]["content"] == text
    assert record["request"]["messages"] == [{"role": "user", "content": "hello"}]
    count = len(record["completion_tokens"])
    assert count >= 5
    assert len(record["completion_token_ids"]) == len(record["per_token_logps"]) == count
    assert all(value <= 0 for value in record["per_token_logps"])
    assert record["prompt_token_ids"]
    assert record["upstream_error"] is None


def test_tool_calls_of_a_stream_are_put_together(proxied: Callable[..., httpx2.Client], trace: Path) -> None:
    reply = ask(proxied(CALL), stream=True, tools=TOOLS)
    assert reply.status_code == 200
    [record] = settled(trace)
    [call] = record["response"]["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("bash", {"command": "ls"})
    assert call["id"]
    assert record["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_of_the_model_is_passed_on_and_recorded(
    proxied: Callable[..., httpx2.Client], trace: Path, streamed: bool
) -> None:
    failing = Script(turns=(Turn(failures=(StatusFailure(status=503, message="no room", attempts=None),)),))
    reply = ask(proxied(failing), stream=streamed)
    assert reply.status_code == 503
    assert "no room" in reply.text
    [record] = settled(trace)
    assert record["upstream_status"] == record["response"]["upstream_status"] == 503
    assert "no room" in json.dumps(record["upstream_error"])
    assert (record["response"]["choices"], record["completion_tokens"]) == ([], [])


def test_a_stream_that_breaks_leaves_what_had_come(proxied: Callable[..., httpx2.Client], trace: Path) -> None:
    script = Script(
        turns=(Turn(text="one two three four five", failures=(CutFailure(after_chunks=4, attempts=None),)),)
    )
    client = proxied(script)
    with pytest.raises(httpx2.HTTPError):
        ask(client, stream=True)
    [record] = settled(trace)
    assert record["upstream_error"]
    assert record["completion_tokens"]
    assert len(record["completion_tokens"]) == len(record["per_token_logps"]) == len(record["completion_token_ids"])


def test_an_agent_that_hangs_up_loses_nothing_of_the_record(proxied: Callable[..., httpx2.Client], trace: Path) -> None:
    slow = Script(turns=(Turn(text="one two three four five six seven eight", token_delay_s=0.02),))
    client = proxied(slow)
    body = {"model": "x", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    with client.stream("POST", "/chat/completions", json=body) as reply:
        next(reply.iter_lines())
    [record] = settled(trace)
    assert "".join(record["completion_tokens"]).startswith("one two three four five six seven eight")
    assert record["finish_reason"] == "stop"


def test_a_model_that_is_not_there_is_a_bad_gateway(trace: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ProxyConfig(upstream_url=f"http://127.0.0.1:{port}", trace=trace, port=0)
    with InterceptionProxy(config) as proxy, httpx2.Client(base_url=proxy.url, trust_env=False) as client:
        assert ask(client).status_code == 502
    [record] = read_trace(trace)
    assert record["upstream_status"] is None
    assert "refused" in record["upstream_error"]["message"].lower()


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/healthz", b"", 200),
        ("GET", "/v1/models", b"", 404),
        ("POST", "/v1/completions", b"{}", 404),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
    ],
)
def test_there_are_two_routes(trace: Path, method: str, path: str, content: bytes, status: int) -> None:
    with InterceptionProxy(ProxyConfig(upstream_url="http://127.0.0.1:9", trace=trace, port=0)) as proxy:
        url = proxy.url.removesuffix("/v1") + path
        assert httpx2.request(method, url, content=content, trust_env=False).status_code == status
    assert read_trace(trace) == []


def test_many_calls_at_once_are_recorded_one_by_one(proxied: Callable[..., httpx2.Client], trace: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    client = proxied(TALK)
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda n: ask(client, stream=bool(n % 2)).status_code, range(64)))
    assert replies == [200] * 64
    records = settled(trace, 64)
    assert [record["turn"] for record in records] == list(range(1, 65))


# -- records --------------------------------------------------------------------------------------------------------


def test_lists_have_one_length_or_are_empty() -> None:
    recording = Recording({}, 1)
    recording.take_reply(
        {
            "choices": [
                {
                    "message": {"content": "ab"},
                    "logprobs": {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": None}]},
                    "token_ids": [1],
                }
            ]
        }
    )
    record = recording.record()
    assert (record["completion_tokens"], record["completion_token_ids"], record["per_token_logps"]) == (
        ["a", "b"],
        [],
        [],
    )


def test_ids_may_come_in_the_entries() -> None:
    recording = Recording({}, 1)
    entries = [{"token": "token_id:7", "logprob": -1.0}, {"token": "b", "token_id": 8, "logprob": -2.0}]
    recording.take_piece({"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": entries}}]})
    assert recording.record()["completion_token_ids"] == [7, 8]


def test_what_the_agent_did_not_ask_for_is_taken_out() -> None:
    reply = {"id": 1, "prompt_token_ids": [1], "choices": [{"delta": {}, "logprobs": {}, "token_ids": [2]}, None]}
    assert stripped(reply) == {"id": 1, "choices": [{"delta": {}}, None]}


def test_a_torn_line_is_left_out_and_a_missing_trace_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    assert read_trace(file) == []
    file.write_text('{"turn": 2}\n{"turn": 1}\n{"tur', encoding="utf-8")
    assert [record["turn"] for record in read_trace(file)] == [1, 2]


# -- as a program ---------------------------------------------------------------------------------------------------


def test_the_proxy_needs_no_packages_and_keeps_its_key_from_others(play: Play, trace: Path, tmp_path: Path) -> None:
    model = play(TALK, api_key="sk-real")
    script = tmp_path / "interception.py"
    script.write_text(interception.SOURCE.read_text(), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-I",
        "-S",
        str(script),
        "--upstream-url",
        model.url,
        "--trace",
        str(trace),
        "--port",
        str(port),
    ]
    environ = {"OPENCODE_UPSTREAM_API_KEY": "sk-real", "PATH": os.environ["PATH"]}
    process = subprocess.Popen([*command, "--model-override", model.name], env=environ, stderr=subprocess.DEVNULL)
    try:

        def is_healthy() -> bool:
            with contextlib.suppress(httpx2.HTTPError):
                answer: object = httpx2.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).json()
                return answer == {"status": "ok"}
            return False

        wait_until(is_healthy, 20, "the proxy did not start")
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", trust_env=False) as client:
            assert ask(client).json()["choices"][0]["message"]["content"] == "one two three four five"
        assert "sk-real" not in " ".join(command)
        if sys.platform == "linux":
            # A process that hides its memory belongs to root there, for every user.
            assert Path(f"/proc/{process.pid}/environ").stat().st_uid == 0
    finally:
        process.terminate()
        process.wait(10)
    assert len(settled(trace)) == 1
