"""Sampling is the trainer's: what of an agent's request reaches the endpoint, and which turns are not trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from openenv.rollout.capture import export
from openenv.rollout.capture.dialects import DIALECTS
from openenv.rollout.capture.dialects.dialect import CallOptions
from openenv.rollout.tasks.model_parameters import SAMPLING, allow, steering
from openenv.rollout.tasks.task import Model, Sampling

PATHS = {"openai_chat": "/chat/completions", "openai_responses": "/responses", "anthropic": "/messages"}
ASKED: dict[str, dict[str, Any]] = {
    "openai_chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "openai_responses": {"model": "m", "input": [{"role": "user", "content": "hi"}]},
    "anthropic": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64},
}
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
FAMILIES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0, "dynatemp_range": 1, "dynatemp_exponent": 2, "top_n_sigma": 1},
    "truncation of the distribution": {"top_p": 0.1, "top_k": 1, "min_p": 0.9, "typical_p": 0.1, "min_keep": 1},
    "penalties": {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 2, "repeat_penalty": 2},
    "other samplers": {
        "mirostat": 2,
        "mirostat_tau": 1,
        "dry_multiplier": 9,
        "xtc_probability": 1,
        "samplers": ["top_k"],
    },
    "seeds and stops": {"seed": 1, "stop": ["x"], "stop_sequences": ["x"], "stop_token_ids": [1], "stop_regex": "x"},
    "several answers": {"n": 1, "n_cmpl": 9, "best_of": 9, "use_beam_search": True, "length_penalty": 2},
    "grammars": {
        "response_format": GRAMMAR,
        "structured_outputs": {"json": {}},
        "guided_json": {},
        "guided_regex": "x",
        "guided_choice": ["x"],
        "guided_grammar": "x",
        "structural_tag": "x",
        "grammar": 'root ::= "x"',
        "json_schema": {},
        "regex": "x",
        "ebnf": "x",
        "output_format": GRAMMAR,
    },
    "probabilities of tokens": {
        "logit_bias": {"1": 100},
        "allowed_token_ids": [1],
        "bad_words": ["x"],
        "custom_logit_processor": "x",
        "logits_processors": ["x"],
        "custom_params": {"a": 1},
        "vllm_xargs": {"a": 1},
        "ignore_eos": True,
        "min_tokens": 9999,
    },
    "forced tokens": {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "generation_prompt": "x",
        "thinking_token_budget": 1,
        "reasoning_budget_tokens": 1,
        "reasoning_budget_message": "x",
    },
    "another prompt": {
        "chat_template": "x",
        "chat_template_kwargs": {"a": 1},
        "input_ids": [1],
        "documents": [],
        "prompt": "x",
    },
    "other models": {
        "lora": [{"id": 0}],
        "lora_path": "x",
        "models": ["x"],
        "fallbacks": ["x"],
        "provider": {"order": ["x"]},
    },
    "the engine's work": {
        "priority": -9,
        "id_slot": 0,
        "cache_salt": "x",
        "kv_transfer_params": {"a": 1},
        "speed": "fast",
    },
    "ways out": {"web_search_options": {}, "mcp_servers": [{}], "container": "x", "background": True, "plugins": [{}]},
    "what nobody knows": {"": 1, "no_such_parameter": [1], "MAX_TOKENS": 9, "max_tokens ": 9, "extra_body": {"n": 9}},
}


def answers(fake: Any) -> Callable[[Any], Any]:
    """Answer in the dialect of each request."""
    chat = fake.vllm([1, 2])

    def respond(request: Any) -> Any:
        if request.path.endswith("/chat/completions"):
            return chat(request)
        usage = {"input_tokens": 3, "output_tokens": 2}
        if request.path.partition("?")[0].endswith("/messages"):
            content = [{"type": "text", "text": "t1 t2 "}]
            return fake.Answer.json({"type": "message", "content": content, "stop_reason": "end_turn", "usage": usage})
        item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t1 t2 "}]}
        return fake.Answer.json({"object": "response", "status": "completed", "output": [item], "usage": usage})

    return respond


@pytest.fixture(params=sorted(PATHS))
def dialect(request: pytest.FixtureRequest) -> Any:
    """A dialect that agent and endpoint speak."""
    return request.param


@pytest.fixture
def ask(open_agent: Callable[..., Any], engine: Any, fake: Any) -> Callable[..., tuple[dict[str, Any], Any]]:
    """Send a request; return what the endpoint got, and the call's record."""
    engine.respond = answers(fake)

    def ask(dialect: Any, more: dict[str, Any], **model: Any) -> tuple[dict[str, Any], Any]:
        agent = open_agent(**{"dialect": dialect, "sampling": {}, **model})
        response = agent.post(PATHS[dialect], {**ASKED[dialect], **more})
        assert response.status_code == 200, response.text
        (call,) = agent.capture.calls()
        assert call.sent == engine.requests[-1].body
        return engine.requests[-1].body, call

    return ask


def test_what_an_agent_does_not_decide_never_reaches_the_endpoint(ask: Any, dialect: Any) -> None:
    for family, parameters in FAMILIES.items():
        sent, call = ask(dialect, parameters)
        assert not set(parameters) & set(sent), family
        assert set(call.removed) == set(parameters), family
        assert call.not_trainable == (), family


def test_the_same_parameters_arrive_where_the_trainer_leaves_them_to_the_agent(ask: Any, dialect: Any) -> None:
    everything = {name: value for family in FAMILIES.values() for name, value in family.items()}
    for name in FAMILIES["several answers"]:
        everything.pop(name)
    sent, call = ask(dialect, everything, agent_may_set=tuple(everything), max_tokens_cap=None)
    assert {name: sent.get(name) for name in everything} == everything
    assert call.removed == ()
    assert call.not_trainable


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (
            "openai_chat",
            "model messages tools tool_choice functions function_call parallel_tool_calls stream max_tokens logprobs"
            " top_logprobs return_token_ids reasoning_effort",
        ),
        (
            "openai_responses",
            "model input instructions tools tool_choice parallel_tool_calls stream stream_options max_output_tokens"
            " include top_logprobs reasoning text store previous_response_id conversation",
        ),
        (
            "anthropic",
            "model system messages tools tool_choice stream max_tokens thinking output_config cache_control",
        ),
    ],
)
def test_of_all_parameters_there_are_these_pass_and_no_others(ask: Any, dialect: Any, expected: str) -> None:
    names = {name for known in SAMPLING.values() for name in known} | set(expected.split())
    values: dict[str, Any] = {**dict.fromkeys(names, "x"), "system": "x", "instructions": "x", "n_predict": 9}
    values.update(ASKED[dialect], stream=False, stream_options={}, max_tokens=9, logprobs=False)
    values.update(thinking={"type": "disabled"}, text={}, output_config={}, reasoning={}, tools=[], include=[])
    sent, call = ask(dialect, values)
    assert set(sent) == set(expected.split())
    assert set(call.removed) == set(values) - set(sent) - ({"stream_options"} if dialect == "openai_chat" else set())


# What the agents really send, shortened to their parameters.
OPENCODE = {
    "temperature": 0,
    "top_p": 1,
    "max_tokens": 8192,
    "stream": True,
    "tool_choice": "auto",
    "reasoning_effort": "low",
}
QWEN = {
    "temperature": 0,
    "top_p": 1,
    "max_tokens": 8192,
    "stream": True,
    "metadata": {"sessionId": "s"},
    "vl_high_resolution_images": True,
}
CODEX = {
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}
CLAUDE = {
    "max_tokens": 32000,
    "temperature": 1,
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "metadata": {"user_id": "u"},
    "context_management": {"edits": []},
}


@pytest.mark.parametrize(
    ("dialect", "body", "kept", "removed"),
    [
        (
            "openai_chat",
            OPENCODE,
            {"tool_choice": "auto", "reasoning_effort": "low", "max_tokens": 4096},
            "temperature top_p",
        ),
        ("openai_chat", QWEN, {"max_tokens": 4096}, "temperature top_p metadata vl_high_resolution_images"),
        (
            "openai_responses",
            CODEX,
            {name: CODEX[name] for name in ("store", "tool_choice", "parallel_tool_calls", "reasoning", "text")},
            "prompt_cache_key client_metadata",
        ),
        (
            "anthropic",
            CLAUDE,
            {"max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 4095}},
            "temperature metadata context_management",
        ),
    ],
    ids=["opencode", "qwen", "codex", "claude"],
)
def test_the_requests_of_real_agents_keep_what_they_need(
    ask: Any, dialect: Any, body: dict[str, Any], kept: dict[str, Any], removed: str
) -> None:
    sent, call = ask(dialect, body)
    assert {name: sent.get(name) for name in kept} == kept
    assert set(call.removed) == set(removed.split())
    assert call.not_trainable == ()


def test_caches_of_an_engine_that_the_trainer_names_still_work(ask: Any) -> None:
    sent, _ = ask("openai_responses", CODEX, engine="openai")
    assert sent["prompt_cache_key"] == "k"
    sent, call = ask("anthropic", CLAUDE, engine="anthropic")
    assert sent["metadata"] == {"user_id": "u"}
    assert set(call.removed) == {"temperature", "context_management"}


# What the trainer says


@pytest.mark.parametrize("dialect", sorted(PATHS))
def test_the_trainers_sampling_is_in_every_call_whatever_the_agent_asks(ask: Any, dialect: Any) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    sent, call = ask(dialect, {"temperature": 0, "top_k": 1}, sampling=sampling)
    assert {name: sent[name] for name in sampling} == sampling
    assert set(call.removed) == {"temperature", "top_k"}


def test_what_is_left_to_the_agent_falls_back_to_the_trainers_value(ask: Any) -> None:
    options = {"sampling": {"temperature": 0.7, "seed": 3}, "agent_may_set": ("temperature",)}
    sent, _ = ask("openai_chat", {"temperature": 0.2, "seed": 9}, **options)
    assert (sent["temperature"], sent["seed"]) == (0.2, 3)
    sent, _ = ask("openai_chat", {}, **options)
    assert sent["temperature"] == 0.7


@pytest.mark.parametrize("path", ["/messages", "/responses"])
def test_sampling_holds_for_agents_that_are_translated(open_agent: Any, engine: Any, fake: Any, path: str) -> None:
    engine.respond = answers(fake)
    agent = open_agent(sampling={"temperature": 0.7, "min_p": 0.1})
    body = {**ASKED["anthropic"], "input": "hi", "temperature": 0, "top_p": 0.1, "stop_sequences": ["x"], "top_k": 1}
    assert agent.post(path, body).status_code == 200
    sent = engine.requests[-1].body
    assert (sent["temperature"], sent["min_p"]) == (0.7, 0.1)
    assert (sent["top_p"], sent["top_k"], "stop" in sent) == (1.0, -1, False)
    assert {"temperature", "top_p", "top_k"} <= set(agent.capture.calls()[0].removed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": {"n": 2}}, "one answer"),
        ({"sampling": {"best_of": 2}}, "one answer"),
        ({"agent_may_set": ("n",)}, "one answer"),
        ({"sampling": {"max_tokens": 5}}, "max_tokens_cap"),
        ({"agent_may_set": ("n_predict",)}, "max_tokens_cap"),
        ({"sampling": {"messages": []}}, "not a sampling parameter"),
        ({"engine": "vllm", "sampling": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"engine": "openai", "sampling": {"min_p": 1}}, "openai does not accept"),
        ({"engine": "ollama"}, "engine"),
    ],
)
def test_what_a_trainer_cannot_set_is_refused_with_a_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Model(base_url="http://x", name="m", **fields)
    Model(base_url="http://x", name="m", sampling={"a_new_parameter": 1, "temperature": 1})


# Limits


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "max_new_tokens", "max_length"],
)
@pytest.mark.parametrize(("value", "expected"), [(9999, 100), (7, 7), (-1, 100), (0, 100), (True, 100), ("9999", 100)])
def test_every_name_of_the_output_limit_is_capped(dialect: Any, name: str, value: Any, expected: int) -> None:
    body = {key: item for key, item in ASKED[dialect].items() if key != "max_tokens"}
    allowed = allow(dialect, {**body, name: value}).body
    done = DIALECTS[dialect].rewrite(allowed, CallOptions(model="m", max_tokens=100))
    limits = {key: item for key, item in done.body.items() if key.startswith(("max_", "n_predict"))}
    own = "max_output_tokens" if dialect == "openai_responses" else "max_tokens"
    assert limits == {own: expected}
    assert done.limit == expected


def test_several_limits_in_one_request_are_one_at_the_endpoint(ask: Any) -> None:
    sent, _ = ask(
        "openai_chat", {"max_completion_tokens": 50, "max_tokens": 9999, "n_predict": -1, "max_new_tokens": 9999}
    )
    assert {name: value for name, value in sent.items() if "max" in name or "predict" in name} == {"max_tokens": 50}


def test_minimum_and_thinking_limits_stay_within_the_cap(ask: Any) -> None:
    names = ("min_tokens", "thinking_token_budget", "reasoning_budget_tokens")
    sent, call = ask("openai_chat", dict.fromkeys(names, 99999), agent_may_set=names)
    assert [sent[name] for name in names] == [4096] * 3
    assert len(call.not_trainable) == 3
    sent, _ = ask("openai_chat", {"min_tokens": 0}, agent_may_set=("min_tokens",))
    assert sent["min_tokens"] == 0


def test_thoughts_for_which_the_cap_leaves_no_room_are_switched_off(ask: Any) -> None:
    sent, _ = ask("anthropic", CLAUDE, max_tokens_cap=1000)
    assert sent["max_tokens"] == 1000
    assert "thinking" not in sent


# Steering

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
HIDDEN_ITEM = "input.item_reference: hidden prompt"
PREFIX = [USER, {"role": "assistant", "content": "The answer is"}]


@pytest.mark.parametrize(
    ("dialect", "body", "reason"),
    [
        ("openai_chat", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice: forced tool"),
        (
            "openai_chat",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice: forced tool",
        ),
        ("openai_chat", {"functions": [{"name": "f"}], "function_call": {"name": "f"}}, "function_call: forced tool"),
        ("openai_chat", {"messages": PREFIX}, "messages: forced prefix"),
        ("openai_responses", {"input": PREFIX}, "messages: forced prefix"),
        ("openai_responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice: forced tool"),
        ("openai_responses", {"previous_response_id": "r"}, "previous_response_id: hidden prompt"),
        ("openai_responses", {"input": [{"type": "item_reference", "id": "i"}]}, HIDDEN_ITEM),
        ("openai_responses", {"input": [{"id": "i"}, USER]}, HIDDEN_ITEM),
        ("openai_responses", {"input": [{"id": "i", "type": "message", "role": "user"}, USER]}, HIDDEN_ITEM),
        ("openai_responses", {"input": [{"id": "i", "type": "reasoning", "status": None}, USER]}, HIDDEN_ITEM),
        (
            "openai_chat",
            {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}, USER]},
            "messages.audio: hidden prompt",
        ),
        ("openai_chat", {"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice: forced tool"),
        ("openai_chat", {"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}}, "tool_choice: forced tool"),
        (
            "openai_chat",
            {"tools": [TOOL], "tool_choice": {"type": None, "function": {"name": "f"}}},
            "tool_choice: forced tool",
        ),
        ("openai_chat", {"tools": [TOOL], "tool_choice": "AUTO"}, "tool_choice: forced tool"),
        ("openai_chat", {"function_call": {"type": "auto", "name": "f"}}, "function_call: forced tool"),
        ("openai_responses", {"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice: forced tool"),
        ("anthropic", {"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice: forced tool"),
        ("anthropic", {"tool_choice": {"type": "none", "tools": [{"name": "f"}]}}, "tool_choice: forced tool"),
        ("anthropic", {"messages": PREFIX}, "messages: forced prefix"),
        ("anthropic", {"tool_choice": {"type": "any"}}, "tool_choice: forced tool"),
        ("anthropic", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: forced tool"),
    ],
)
def test_steering_that_agents_need_passes_and_is_recorded(
    ask: Any, dialect: Any, body: dict[str, Any], reason: str
) -> None:
    sent, call = ask(dialect, body)
    assert {name: sent[name] for name in body} == body
    assert call.not_trainable == (reason,)
    assert export.turn(call).not_trainable[0] == reason


@pytest.mark.parametrize("dialect", sorted(PATHS))
@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_choices_that_force_nothing_are_trainable(dialect: Any, choice: Any) -> None:
    value = {"type": choice} if dialect == "anthropic" and choice else choice
    assert steering(dialect, {**ASKED[dialect], "tool_choice": value, "response_format": {"type": "text"}}) == ()


@pytest.mark.parametrize(
    "name", [name for family in ("grammars", "probabilities of tokens", "forced tokens") for name in FAMILIES[family]]
)
def test_every_steering_parameter_that_the_trainer_lets_pass_is_recorded(name: str) -> None:
    values = {name: value for family in FAMILIES.values() for name, value in family.items()}
    value = values[name] if values[name] != {} else {"type": "object"}
    (reason,) = steering("openai_chat", {**ASKED["openai_chat"], name: value})
    assert reason.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("dialect", "tool", "expected", "removed"),
    [
        (
            "openai_chat",
            {"type": "function", "function": {"name": "f", "strict": True}},
            {"type": "function", "function": {"name": "f", "strict": False}},
            "tools.strict",
        ),
        (
            "openai_chat",
            {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": {}}}},
            {"type": "custom", "custom": {"name": "c"}},
            "tools.format",
        ),
        (
            "openai_chat",
            {"type": "builtin_function", "function": {"name": "$web_search"}},
            None,
            "tools.builtin_function",
        ),
        (
            "openai_responses",
            {"type": "function", "name": "f"},
            {"type": "function", "name": "f", "strict": False},
            None,
        ),
        (
            "openai_responses",
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
            },
            {"type": "custom", "name": "apply_patch"},
            "tools.format",
        ),
        (
            "openai_responses",
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "strict": True}]},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "strict": False}]},
            "tools.strict",
        ),
        ("openai_responses", {"type": "web_search"}, None, "tools.web_search"),
        ("openai_responses", {"type": "mcp", "server_url": "http://x"}, None, "tools.mcp"),
        ("openai_responses", {"type": "code_interpreter", "container": {}}, None, "tools.code_interpreter"),
        ("anthropic", {"name": "f", "input_schema": {}}, {"name": "f", "input_schema": {}}, None),
        ("anthropic", {"name": "f", "strict": True}, {"name": "f", "strict": False}, "tools.strict"),
        ("anthropic", {"type": "bash_20250124", "name": "bash"}, {"type": "bash_20250124", "name": "bash"}, None),
        ("anthropic", {"type": "web_search_20250305", "name": "w"}, None, "tools.web_search_20250305"),
    ],
)
def test_tools_lose_what_constrains_the_model_and_those_that_run_elsewhere_are_removed(
    dialect: Any, tool: dict[str, Any], expected: Any, removed: str | None
) -> None:
    other = {"openai_chat": TOOL, "openai_responses": {"type": "custom", "name": "c"}, "anthropic": {"name": "f"}}[
        dialect
    ]
    body = {**ASKED[dialect], "tools": [tool, other]}
    done = allow(dialect, body)
    assert done.body["tools"] == ([other] if expected is None else [expected, other])
    assert done.removed == (() if removed is None else (removed,))
    assert steering(dialect, done.body) == ()
    if removed is not None:
        kept = allow(dialect, body, may_set=(removed,))
        assert (kept.body["tools"], kept.removed) == ([tool, other], ())
        assert bool(steering(dialect, kept.body)) == (removed in ("tools.strict", "tools.format"))


def test_a_choice_of_tools_that_are_removed_is_removed_with_them() -> None:
    body = {"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": "auto", "parallel_tool_calls": True}
    done = allow("openai_responses", body)
    assert done.body == {"input": "hi"}
    assert done.removed == ("tools.web_search", "tool_choice", "parallel_tool_calls")
    body = {"input": "hi", "tools": [{"type": "custom", "name": "c"}], "tool_choice": {"type": "web_search_preview"}}
    done = allow("openai_responses", body)
    assert (set(done.body), done.removed) == ({"input", "tools"}, ("tool_choice",))


def test_parameters_inside_of_messages_and_of_others_are_removed_too(ask: Any) -> None:
    messages = [
        {"role": "system", "content": "s", "tools": [TOOL]},
        USER,
        {"role": "user", "content": "x", "partial": True},
    ]
    sent, call = ask("openai_chat", {"messages": messages, "stream_options": {"include_usage": True, "x": 1}})
    assert [set(message) for message in sent["messages"]] == [{"role", "content"}] * 3
    assert call.removed == ("messages.tools", "messages.partial", "stream_options.x")
    assert call.request["messages"] == messages
    sent, call = ask("openai_responses", {"text": {"verbosity": "low", "format": GRAMMAR}, "reasoning": {"x": 1}})
    assert (sent["text"], sent["reasoning"], call.removed) == ({"verbosity": "low"}, {}, ("text.format", "reasoning.x"))
    sent, call = ask("anthropic", {"output_config": {"effort": "low", "format": GRAMMAR}})
    assert (sent["output_config"], call.removed) == ({"effort": "low"}, ("output_config.format",))
    sent, call = ask("anthropic", {"output_config": {"format": GRAMMAR}}, agent_may_set=("output_config.format",))
    assert call.not_trainable == ("output_config.format: constrained decoding",)


def test_a_reference_to_an_item_excludes_the_turn_even_if_a_bridge_drops_it(
    open_agent: Callable[..., Any], engine: Any, fake: Any
) -> None:
    agent = open_agent(sampling=Sampling())
    agent.post("/responses", {"input": [{"type": "item_reference", "id": "i"}, USER]})
    (call,) = agent.capture.calls()
    assert call.not_trainable == (HIDDEN_ITEM,)
    (sequence,) = agent.capture.sequences()
    assert (sequence.n_trainable, sequence.trainable) == (0, False)


STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: X"}


@pytest.mark.parametrize(
    ("dialect", "body", "may_set", "expected"),
    [
        ("openai_chat", {"response_format": GRAMMAR}, ("response_format",), {"response_format": GRAMMAR}),
        ("openai_chat", {"response_format": {"type": "text"}}, ("response_format",), {}),
        ("openai_chat", {"guided_regex": "a+", "regex": ""}, ("guided_regex", "regex"), {"guided_regex": "a+"}),
        ("openai_chat", {"grammar": "root ::= x"}, (), {}),
        ("openai_chat", {"structured_outputs": {"json": {}}}, ("structured_outputs",), None),
        ("openai_chat", {"tools": [STRICT, TOOL]}, ("tools.strict",), {"tools": [STRICT["function"]]}),
        ("openai_chat", {"tools": [STRICT]}, (), {}),
        ("openai_chat", {"tools": [TOOL], "tool_choice": "required"}, (), {"tool_choice": "required"}),
        ("openai_responses", {"text": {"format": GRAMMAR}}, ("text.format",), {"text.format": GRAMMAR}),
        (
            "openai_responses",
            {"tools": [{"type": "custom", "name": "c", "format": LARK}]},
            ("tools.format",),
            {"tools": [{"type": "custom", "name": "c", "format": LARK}]},
        ),
        (
            "openai_responses",
            {"tools": [{"type": "function", "name": "f"}]},
            ("tools.strict",),
            {"tools": [{"type": "function", "name": "f", "strict": True}]},
        ),
        ("anthropic", {"output_config": {"format": GRAMMAR}}, ("output_config.format",), None),
    ],
)
def test_grammars_and_schemas_of_a_call_are_recorded(
    ask: Any, dialect: Any, body: dict[str, Any], may_set: tuple[str, ...], expected: Any
) -> None:
    _, call = ask(dialect, body, agent_may_set=may_set)
    if expected is None:
        expected = {".".join(may_set[0].split(".")): next(iter(body.values()))}
        expected = {name: value.get("format", value) for name, value in expected.items()}
    assert call.constraints == expected
    assert bool(call.not_trainable) == bool(expected)
    assert export.turn(call).constraints == expected


def test_constraints_of_each_call_are_in_sequences_traces_and_documents(
    open_agent: Any, engine: Any, fake: Any
) -> None:
    engine.respond = fake.vllm([1, 2])
    agent = open_agent(sampling=Sampling(), agent_may_set=("response_format",))
    agent.chat(messages=[{**USER, "ids": [7]}])
    agent.chat(messages=[{**USER, "ids": [8]}], response_format=GRAMMAR)
    expected: list[dict[str, Any]] = [{}, {"response_format": GRAMMAR}]
    by_call = {sequence.root_id: sequence.constraints for sequence in agent.capture.sequences()}
    assert by_call == {1: [expected[0]], 2: [expected[1]]}
    recording = agent.capture.recording()
    document = export.document(recording)
    assert [turn["constraints"] for turn in document["turns"]] == expected
    assert {sequence["root_id"]: sequence["constraints"] for sequence in document["sequences"]} == by_call
    entries = export.trace_entries(recording)
    assert [entry["metadata"]["constraints"] for entry in entries] == expected
    rows = [row for table in export.tables([recording]) for row in table.to_pylist()]
    assert {row["node_ids"][0]: json.loads(row["constraints"]) for row in rows} == by_call


def test_a_steered_turn_is_masked_and_the_others_of_its_rollout_are_trained_on(
    open_agent: Any, engine: Any, fake: Any
) -> None:
    engine.respond = fake.vllm([1, 2])
    agent = open_agent(sampling=Sampling())
    first = [{"role": "user", "content": "a", "ids": [7, 8]}]
    second = [
        *first,
        {"role": "assistant", "content": "t1 t2 ", "ids": [1, 2]},
        {"role": "user", "content": "b", "ids": [9]},
    ]
    third = [
        *second,
        {"role": "assistant", "content": "t1 t2 ", "ids": [1, 2]},
        {"role": "user", "content": "c", "ids": [9]},
    ]
    agent.chat(messages=first)
    agent.chat(messages=second, tools=[TOOL], tool_choice="required")
    agent.chat(messages=third)
    (sequence,) = agent.capture.sequences()
    assert sequence.input_ids == [7, 8, 1, 2, 9, 1, 2, 9, 1, 2]
    assert sequence.loss_mask == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert sequence.trainable
    recording = agent.capture.recording()
    document = export.document(recording)
    assert document["trainable"]
    assert [turn["not_trainable"] for turn in document["turns"]] == [[], ["tool_choice: forced tool"], []]
    findings = [finding for finding in document["validation"] if finding["code"] == "steered_turn"]
    assert [(finding["severity"], finding["call"]) for finding in findings] == [("WARN", 2)]
    entries = export.trace_entries(recording)
    assert [entry["loss_mask"] for entry in entries] == [[0, 0, 1, 1], [0] * 7, [0] * 8 + [1, 1]]
    assert entries[1]["metadata"]["not_trainable"] == ["tool_choice: forced tool"]


def test_a_rollout_of_steered_turns_only_is_not_trained_on(open_agent: Any) -> None:
    agent = open_agent()
    agent.chat(messages=PREFIX)
    (sequence,) = agent.capture.sequences()
    assert not sequence.trainable
    document = export.document(agent.capture.recording())
    assert not document["trainable"]
    assert "nothing_trainable" in [finding["code"] for finding in document["validation"]]


def test_records_of_an_older_version_are_read_with_the_reason(agent: Any) -> None:
    agent.chat(messages=PREFIX)
    file = agent.capture.path / "calls.log"
    data = file.read_bytes()
    assert b'"not_trainable":["messages: forced prefix"],' in data
    data = re.sub(rb'"c":"[0-9a-f]{8}",', b"", data)  # nor did it write checksums
    file.write_bytes(data.replace(b'"not_trainable":["messages: forced prefix"],', b""))
    assert agent.capture.calls()[0].not_trainable == ("messages: forced prefix",)


@pytest.mark.parametrize("ending", ["before the first token", "after one token"])
def test_an_agent_that_hangs_up_does_not_make_its_rollout_one_that_is_not_trained_on(
    open_agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None], ending: str
) -> None:
    agent = open_agent(sampling=Sampling())
    agent.chat()
    chunks = [{**fake.chat_chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2]}]
    if ending == "after one token":  # as llama.cpp: it names the prompt's ids after the end
        entries = {"content": [{"id": 5, "token": "x", "logprob": -0.5}]}
        chunks = [fake.chat_chunk({"content": "x"}, logprobs=entries)]
    engine.respond = lambda request: fake.Answer.events(*(fake.event(chunk) for chunk in chunks), 5.0)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "other"}]}
    with agent.client.stream("POST", "/chat/completions", json=body, headers=agent.headers) as response:
        if ending == "after one token":
            next(response.iter_lines())
        else:
            wait_for(lambda: (agent.capture.path / "calls.log").read_bytes().count(b'"k":"prompt"') == 2)
    wait_for(lambda: agent.capture.stats().active == 0)
    recording = agent.capture.recording()
    assert [call.ended for call in recording.calls] == ["complete", "agent_gone"]
    document = export.document(recording)
    assert (document["trainable"], document["capture_level"]) == (True, "tokens")
    assert len(export.trace_entries(recording)) == 1


def test_a_model_that_says_nothing_does_not_make_its_rollout_one_that_is_not_trained_on(
    open_agent: Any, engine: Any, fake: Any
) -> None:
    agent = open_agent(sampling=Sampling())
    agent.chat()
    end, usage = (
        fake.chat_chunk({}, finish="stop"),
        {"completion_tokens": 1},
    )  # llama.cpp counts the end, and names none
    pieces = [fake.event(end), fake.event({**fake.chat_chunk({}), "choices": [], "usage": usage}), fake.DONE]
    engine.respond = lambda request: fake.Answer.events(*pieces)
    agent.chat_stream("other")
    recording = agent.capture.recording()
    document = export.document(recording)
    assert (document["trainable"], document["capture_level"]) == (True, "tokens")
    assert [finding["code"] for finding in document["validation"] if finding["call"] == 2] == ["empty_turn"]
    assert len(export.trace_entries(recording)) == 1


def test_the_query_of_an_agents_address_reaches_the_endpoint_only_as_far_as_it_is_known(
    ask: Any, open_agent: Any, engine: Any
) -> None:
    agent = open_agent(dialect="anthropic")
    agent.post("/messages?beta=true&n_predict=9999&api-version=1&key=x", ASKED["anthropic"])
    assert engine.requests[-1].path == "/v1/messages?beta=true&api-version=1"
