"""Requests to the endpoint: forced parameters, limits, thinking, and parameters that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from openenv.rollout.capture.dialects import DIALECTS, route
from openenv.rollout.capture.dialects.dialect import CallOptions
from openenv.rollout.tasks.model_parameters import derived_seed
from openenv.rollout.tasks.task import Sampling


def rewritten(body: dict[str, Any], **options: Any) -> dict[str, Any]:
    return DIALECTS["openai_chat"].rewrite(body, CallOptions(**{"model": "m", **options})).body


def test_a_path_is_recognised_by_its_end() -> None:
    assert route("/v1/chat/completions").dialect is DIALECTS["openai_chat"]
    assert route("/chat/completions/").dialect is DIALECTS["openai_chat"]
    assert route("/v1/responses").dialect is DIALECTS["openai_responses"]
    assert route("/v1/v1/messages").dialect is DIALECTS["anthropic"]
    assert route("/v1/messages/count_tokens").kind == "count"
    assert route("/v1/embeddings") is None


def test_the_agents_own_request_is_left_alone() -> None:
    body = {"messages": [], "logprobs": False, "stream": True}
    before = dict(body)
    sent = rewritten(body)
    assert body == before
    assert sent["logprobs"] is True
    assert sent["stream_options"] == {"include_usage": True}


def test_what_the_agent_asks_for_itself_is_not_forced_and_not_taken_away() -> None:
    body = {"messages": [], "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    done = DIALECTS["openai_chat"].rewrite(body, CallOptions(model="m"))
    assert done.forced == frozenset()
    assert done.body["top_logprobs"] == 2


@pytest.mark.parametrize(
    ("model", "limits", "cap", "expected"),
    [
        ("m", {"max_tokens": 9000}, 4096, {"max_tokens": 4096}),
        ("m", {"max_tokens": 10}, 4096, {"max_tokens": 10}),
        ("m", {"max_completion_tokens": 9000}, 4096, {"max_tokens": 4096}),
        ("m", {"max_tokens": 9000, "max_completion_tokens": 7}, 4096, {"max_tokens": 7}),
        ("m", {}, 4096, {"max_tokens": 4096}),
        ("m", {}, None, {}),
        ("m", {"max_tokens": 7}, None, {"max_tokens": 7}),
        ("gpt-5-mini", {"max_tokens": 9000}, 4096, {"max_completion_tokens": 4096}),
        ("openai/o3", {"max_tokens": 5}, None, {"max_completion_tokens": 5}),
        ("o1", {}, 4096, {"max_completion_tokens": 4096}),
        ("o4-mini", {"max_tokens": 1, "max_completion_tokens": 2}, 4096, {"max_completion_tokens": 2}),
        ("olmo", {"max_tokens": 5}, None, {"max_tokens": 5}),
    ],
)
def test_token_limits_are_capped_and_named_as_the_model_expects(
    model: str, limits: dict[str, int], cap: int | None, expected: dict[str, int]
) -> None:
    sent = rewritten(limits, model=model, max_tokens=cap)
    assert {key: value for key, value in sent.items() if key.startswith("max_")} == expected


def test_thinking_is_switched_off_beside_other_template_arguments() -> None:
    sent = rewritten({"chat_template_kwargs": {"a": 1}}, disable_thinking=True)
    assert sent["chat_template_kwargs"] == {"a": 1, "enable_thinking": False}


def test_a_refused_parameter_is_left_out_from_then_on(agent: Any, engine: Any, fake: Any) -> None:
    good = fake.vllm([1, 2])

    def respond(request: Any) -> Any:
        for name in ("return_token_ids", "stream_options"):
            if name in request.body:
                return fake.Answer.json({"error": {"message": f"Unrecognized request argument: {name}"}}, 400)
        return good(request)

    engine.respond = respond
    agent.chat_stream()
    assert len(engine.requests) == 3
    agent.chat_stream()
    assert len(engine.requests) == 4
    first, second = agent.capture.calls()
    assert (first.ended, first.attempts, "return_token_ids" in first.sent) == ("complete", 1, False)
    assert second.completion.sampled.logprobs == (-0.001, -0.002)
    assert second.completion.prompt_ids is None
    assert "return_token_ids" not in second.sent


def test_top_logprobs_are_left_out_before_logprobs_are(agent: Any, engine: Any, fake: Any) -> None:
    good = fake.vllm([1])
    complaint = "Requested sample logprobs of 5, which is greater than max allowed: 0"

    def respond(request: Any) -> Any:
        return fake.Answer.json({"message": complaint}, 400) if "top_logprobs" in request.body else good(request)

    engine.respond = respond
    agent.chat()
    assert agent.capture.calls()[0].completion.sampled.logprobs == (-0.001,)


def test_an_engine_with_ids_for_whole_answers_only_is_asked_for_those_and_the_agent_still_gets_a_stream(
    agent: Any, engine: Any, fake: Any
) -> None:
    good = fake.vllm([5, 6, 7])

    def respond(request: Any) -> Any:
        if request.body.get("stream") and request.body.get("return_token_ids"):
            message = "return_token_ids is not supported with stream=true"
            return fake.Answer.json({"object": "error", "message": message, "code": 400}, 400)
        answer = good(request)
        if not request.body.get("stream"):  # SGLang names the prompt's ids in the choice
            whole = json.loads(answer.pieces[0])
            whole["choices"][0]["prompt_token_ids"] = whole.pop("prompt_token_ids")
            whole["metadata"] = {"weight_version": "w7"}
            return fake.Answer.json(whole)
        return answer

    engine.respond = respond
    chunks = agent.chat_stream()
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == "t5 t6 t7 "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(
        "token_ids" not in choice and "prompt_token_ids" not in choice for c in chunks for choice in c["choices"]
    )
    (call,) = agent.capture.calls()
    assert call.completion.sampled.ids == (5, 6, 7)
    assert call.completion.prompt_ids is not None
    assert call.policy_version == "w7"


def test_an_agent_that_waits_for_such_a_stream_gets_comments(
    agent: Any, engine: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.rollout.capture.answer_relay.PING_S", 0.05)
    good = fake.vllm([5])

    def respond(request: Any) -> Any:
        if request.body.get("stream"):
            return fake.Answer.json({"message": "return_token_ids cannot be combined with stream"}, 400)
        answer = good(request)
        return fake.Answer([0.3, *answer.pieces], 200, answer.headers)

    engine.respond = respond
    body = {"stream": True, "messages": [{"role": "user", "content": "hi"}]}
    text = agent.post("/chat/completions", body).text
    assert text.startswith(": waiting\n\n")
    assert '"t5 "' in text
    assert text.endswith("data: [DONE]\n\n")


def test_a_redirect_of_the_endpoint_is_an_error(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = lambda request: fake.Answer.json({}, 307, location="http://elsewhere")
    assert agent.chat().status_code == 502
    (call,) = agent.capture.calls()
    assert (call.ended, call.status) == ("failed", 307)


def test_the_base_address_may_omit_its_version(open_agent: Callable[..., Any], engine: Any) -> None:
    agent = open_agent(base_url=engine.url.removesuffix("/v1"), extra_headers={"X-Team": "a"})
    agent.chat()
    assert engine.requests[0].path == "/v1/chat/completions"
    assert engine.requests[0].headers["x-team"] == "a"
    assert "cookie" not in engine.requests[0].headers


def llama(fake: Any, ids: list[int], sampled: list[int], *, completion_tokens: int) -> Callable[[Any], Any]:
    """llama.cpp: ids in the entries, none of the prompt; those are on routes of their own."""

    def respond(request: Any) -> Any:
        if request.path == "/apply-template":
            return fake.Answer.json({"prompt": "<|user|>" + request.body["messages"][-1]["content"]})
        if request.path == "/tokenize":
            return fake.Answer.json({"tokens": ids})
        chunks = [
            fake.chat_chunk({"content": "x"}, logprobs={"content": [{"id": token, "token": "x", "logprob": -0.5}]})
            for token in sampled
        ]
        usage = {"prompt_tokens": 3, "completion_tokens": completion_tokens}
        chunks.append(fake.chat_chunk({}, finish="stop"))
        chunks.append({**fake.chat_chunk({}), "choices": [], "usage": usage, "timings": {"cache_n": 0}})
        return fake.Answer.events(*(fake.event(chunk) for chunk in chunks), fake.DONE)

    return respond


def test_llama_cpp_is_asked_for_the_ids_of_the_prompt(open_agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = llama(fake, [7, 8, 9], [1, 2], completion_tokens=3)
    agent = open_agent(sampling=Sampling())
    agent.chat_stream("hello")
    assert [request.path for request in engine.requests] == ["/v1/chat/completions", "/apply-template", "/tokenize"]
    assert engine.requests[2].body["content"] == "<|user|>hello"
    (call,) = agent.capture.calls()
    assert (call.completion.prompt_ids, call.completion.sampled.ids) == ((7, 8, 9), (1, 2))
    (sequence,) = agent.capture.sequences()
    assert sequence.trainable
    assert [finding.code for finding in sequence.validation] == ["prompt_ids_asked"]


def test_ids_of_a_prompt_that_are_not_as_many_as_the_engine_read_do_not_count(
    agent: Any, engine: Any, fake: Any
) -> None:
    engine.respond = llama(fake, [7, 8], [1], completion_tokens=2)
    agent.chat_stream()
    agent.chat_stream()
    assert len(engine.requests) == 4  # the routes are tried once
    assert all(call.completion.prompt_ids is None for call in agent.capture.calls())
    assert all(call.ended == "complete" for call in agent.capture.calls())


def test_tokens_that_the_engine_counts_and_does_not_name_make_a_turn_untrainable(
    agent: Any, engine: Any, fake: Any
) -> None:
    engine.respond = llama(fake, [7, 8, 9], [1, 2], completion_tokens=5)
    agent.chat_stream()
    (sequence,) = agent.capture.sequences()
    assert not sequence.trainable
    assert "missing_tokens" in [finding.code for finding in sequence.validation]


def test_a_kept_connection_that_the_endpoint_has_closed_costs_no_attempt(agent: Any, engine: Any, fake: Any) -> None:
    good = fake.vllm([1])

    def respond(request: Any) -> Any:
        if len(engine.requests) == 2:
            return fake.Answer([None])  # hangs up on the second request without an answer
        return good(request)

    engine.respond = respond
    agent.chat()
    assert agent.chat().status_code == 200
    assert agent.capture.calls()[1].attempts == 1
    assert agent.capture.stats().failures_in_a_row == 0


def test_each_call_of_a_seeded_rollout_has_a_seed(open_agent: Any, engine: Any, fake: Any) -> None:
    agent = open_agent(seed=5)
    agent.chat(seed=1)  # the agent's seed does not count
    agent.chat("again")
    assert [request.body["seed"] for request in engine.requests] == [derived_seed(5, 1), derived_seed(5, 2)]
    assert [call.sent["seed"] for call in agent.capture.calls()] == [derived_seed(5, 1), derived_seed(5, 2)]


def test_an_endpoint_without_seeds_is_called_without_one(open_agent: Any, engine: Any, fake: Any) -> None:
    answer = engine.respond

    def respond(request: Any) -> Any:
        if "seed" in request.body:
            return fake.Answer.json({"error": {"message": "Unrecognized request argument: seed"}}, 400)
        return answer(request)

    engine.respond = respond
    agent = open_agent(seed=5)
    assert [agent.chat().status_code for _ in range(2)] == [200, 200]
    assert ["seed" in request.body for request in engine.requests] == [True, False, False]
