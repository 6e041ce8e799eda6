"""What the published names do with the same values: run by an interpreter of each package, which prints JSON.

Only names of the published package are used here. Texts are the packages' own, so findings are compared by their codes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from openenv.core.harness.capture import APIType, RolloutGraph, TurnNode, contract, server, sse
from openenv.core.harness.capture.compat import ParamFix, behaviour_warnings, diagnose
from openenv.core.harness.capture.detection import detect, extract_model
from openenv.core.harness.capture.dialects import TransformManager, images, reasoning
from openenv.core.harness.capture.export import check_rollout, export_session, summarise
from openenv.core.harness.capture.graph import common_prefix_len
from openenv.core.harness.capture.providers import anthropic_request, anthropic_response
from openenv.core.harness.capture.sessions import (
    Session,
    Upstream,
    clean_session_id,
    evaluation_sampling,
    extract_api_key,
    extract_harness_session,
    rollout_type_for,
)
from openenv.core.harness.capture.upstream import (
    auth_headers,
    normalise_engine_base,
    normalize_response,
    openai_api_base,
    prepare_request,
    training_sampling,
    truncating_params,
)
from openenv.core.harness.capture.validate import check_turn, check_turn_eval, check_upstream_response

SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(run: Callable[[], Any]) -> Callable[[], Any]:
    """Add a scenario under its name."""
    SCENARIOS[run.__name__] = run
    return run


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or the kind of its error."""
    try:
        return call(*args, **kwargs)
    except (ValueError, RuntimeError) as exc:
        return f"raises {type(exc).__name__}"


def codes(findings: Any) -> list[str]:
    """Levels and codes of findings, sorted."""
    return sorted(re.sub(r"[\[\]]", "", str(finding)).split(":")[0] for finding in findings)


def node(name: str, prompt: list[int], sampled: list[int], **fields: Any) -> TurnNode:
    """A call with a log-probability for each sampled token."""
    fields.setdefault("sampled_logprobs", [-token / 100 for token in sampled])
    fields.setdefault("n_tools", 1)
    return TurnNode(name, prompt, sampled, **fields)


def calls(*texts: str, reply: str | None = None, **fields: Any) -> dict[str, Any]:
    """Messages of a call without ids, users and assistants in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    system = [{"role": "system", "content": fields.pop("system")}] if "system" in fields else []
    answer = {"role": "assistant", "content": reply} if reply is not None else {}
    return {"request_messages": [*system, *messages], "response_message": answer, **fields}


GRAPHS: dict[str, list[TurnNode]] = {
    "chain": [node("a", [1, 2], [3]), node("b", [1, 2, 3, 4], [5, 6]), node("c", [1, 2, 3, 4, 5, 6, 7], [8])],
    "late": [node("c", [1, 2, 3, 4, 5], [6]), node("a", [1], [2]), node("b", [1, 2, 3], [4])],
    "retry": [node("a", [1, 2], [3]), node("b", [1, 2], [4]), node("c", [1, 2, 4, 9], [5])],
    "fork": [node("a", [1], [2]), node("b", [1, 2, 3], [4]), node("c", [1, 2, 3], [5]), node("d", [1, 2, 3, 5], [6])],
    "roots": [node("a", [1], [2], n_tools=0), node("b", [7], [8]), node("c", [7, 8, 9], [3])],
    "no tools": [node("a", [1], [2], n_tools=0), node("b", [7], [8], n_tools=0)],
    "context": [node("a", [1], [2]), node("b", [1, 2, 3], [4], sampled_logprobs=None), node("c", [1, 2, 3, 4, 5], [6])],
    "cut": [node("a", [1], [2], finish_reason="length")],
    "nothing": [],
    "empty": [node("a", [1], []), node("b", [1, 2], [3])],
    "certain": [node("a", [1], [2, 3], sampled_logprobs=[0.0, -1.0])],
    "messages": [
        node("a", [], [], **calls("hi", reply="yes", system="one")),
        node("b", [], [], **calls("hi", "yes", "more", reply="no", system="two")),
        node("c", [], [], **calls("other", reply="x")),
    ],
}
ARGUMENTS = [
    node(
        "a",
        [],
        [],
        request_messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        response_message={
            "content": None,
            "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}],
        },
    ),
    node(
        "b",
        [],
        [],
        request_messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "y", "function": {"name": "f", "arguments": '{"a":2,"b":1}'}}],
            },
            {"role": "tool", "tool_call_id": "y", "content": "done"},
        ],
    ),
]


def graph_of(name: str) -> RolloutGraph:
    """A graph of the table."""
    graph = RolloutGraph()
    for each in GRAPHS[name]:
        graph.add_turn(each)
    return graph


@scenario
def graphs() -> Any:
    described = {}
    for name in GRAPHS:
        graph = graph_of(name)
        described[name] = {
            "parents": {each.node_id: each.parent_id for each in graph.nodes()},
            "index": [each.index for each in graph.nodes()],
            "stats": graph.stats(),
            "roots": [each.node_id for each in graph.roots()],
            "leaves": [each.node_id for each in graph.leaves()],
            "forks": [[parent, list(children)] for parent, children in graph.forks()],
            "discarded": sorted(each.node_id for each in graph.discarded_nodes()),
            "paths": [[each.node_id for each in path] for path in graph.paths()],
            "sequences": [{**vars(item), "turns": item.turn_lengths()} for item in graph.sequences()],
            "root_of": {each.node_id: graph.root_of(each.node_id) for each in graph.nodes()},
            "check": codes(check_rollout(graph).findings),
            "check text": codes(check_rollout(graph, capture_level="text", budget_stop_count=1).findings),
        }
    return described


@scenario
def arguments_that_were_written_again() -> Any:
    graph = RolloutGraph()
    for each in ARGUMENTS:
        graph.add_turn(each)
    return [each.parent_id for each in graph.nodes()]


@scenario
def documents() -> Any:
    described: dict[str, Any] = {}
    for name in GRAPHS:
        for level in ("tokens", "text"):
            for purpose in ("auto", "eval"):
                session = Session(
                    "s1", graph=graph_of(name), metadata={"k": 1}, purpose=purpose, findings=["[WARN] x: y"]
                )
                document = export_session(session, include_discarded=True, include_messages=True, capture_level=level)
                lines = summarise(document).splitlines()
                document["validation"] = codes(document["validation"])
                for row in document["sequences"]:
                    row["validation"] = codes(row["validation"])
                    row["loss_mask"] = list(row["loss_mask"])
                described[f"{name} {level} {purpose}"] = {**document, "lines": len(lines)}
                short = export_session(session, capture_level=level)
                described[f"{name} {level} {purpose} short"] = [row["role"] for row in short["sequences"]]
    return described


@scenario
def contracts() -> Any:
    described: dict[str, Any] = {}
    for name in GRAPHS:
        graph = graph_of(name)
        document = export_session(Session("s1", graph=graph), include_messages=True)
        described[name] = {
            "entries": outcome(contract.to_trace_entries, graph, document),
            "records": outcome(contract.to_turn_records, graph, document),
            "trace": outcome(lambda g=graph, d=document: contract.to_training_trace(g, d).model_dump()),
        }
        if document["sequences"] and document["sequences"][0]["loss_mask"][1:]:
            document["sequences"][0]["loss_mask"][-1] ^= 1
            described[f"{name} other mask"] = {
                "entries": outcome(contract.to_trace_entries, graph, document),
                "records": outcome(contract.to_turn_records, graph, document),
            }
    return described


class Tokenizer:
    """A template: a token per character."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        if any("boom" in str(message) for message in messages):
            raise TypeError("boom")
        return [len(str(message.get("content"))) for message in messages]


@scenario
def retokenization() -> Any:
    graph = RolloutGraph()
    graph.add_turn(node("a", [2, 3], [4], request_messages=[{"content": "hi"}, {"content": "you"}]))
    graph.add_turn(node("b", [9], [4], request_messages=[{"content": "hi"}]))
    graph.add_turn(node("c", [8], [4], request_messages=[{"content": "boom"}]))
    document = export_session(Session("s1", graph=graph))
    return contract.measure_retokenization_skew(graph, document, Tokenizer())


@scenario
def turns() -> Any:
    cases: list[tuple[Any, Any, Any, dict[str, Any]]] = [
        ([1], [2], [-0.1], {}),
        ([], [2], [-0.1], {}),
        ([1], [], None, {}),
        ([1], [2], None, {}),
        ([1], [2, 3], [-0.1], {}),
        ([1], [2], [0.5], {}),
        ([1], [2], [float("nan")], {}),
        ([-1], [2], [-0.1], {}),
        ([True], [2], [-0.1], {}),
        ([1], [2], [-0.1], {"finish_reason": "length"}),
    ]
    described: list[Any] = [codes(check_turn(*case[:3], **case[3]).findings) for case in cases]
    masks = ([0, 1], [1, 1], [0], [0, 2], [0, 0])
    described += [outcome(contract.validate_training_turn, [1], [2], [-0.1], mask) for mask in masks]
    messages: list[Any] = [{"content": "x"}, {"content": " "}, {"tool_calls": [1]}, None]
    described += [codes(check_turn_eval(message, finish_reason="length").findings) for message in messages]
    return described


@scenario
def responses_of_engines() -> Any:
    entry = {"token": "token_id:5", "logprob": -0.1}
    whole = {"prompt_token_ids": [1], "choices": [{"token_ids": [5], "logprobs": {"content": [entry]}}]}
    cases: list[Any] = [
        whole,
        {"choices": []},
        {"choices": [{}]},
        {**whole, "choices": [{"token_ids": [5, 6], "logprobs": {"content": [entry]}}]},
        {**whole, "choices": [{"token_ids": [5], "logprobs": {"content": [{"token": "x", "logprob": -1}]}}]},
        {**whole, "choices": [{"token_ids": [6], "logprobs": {"content": [dict(entry)]}}]},
        {"choices": [{"prompt_token_ids": [4], "message": {"reasoning": "so"}}]},
    ]
    found = [codes(check_upstream_response(json.loads(json.dumps(case))).findings) for case in cases]
    return [found, [normalize_response(json.loads(json.dumps(case))) for case in cases]]


@scenario
def requests() -> Any:
    base = {"model": "x", "messages": [{"role": "assistant", "reasoning_content": "so", "content": ""}]}
    cases: list[dict[str, Any]] = [
        base,
        {**base, "top_p": 0.5, "top_k": 5, "temperature": 0.1, "_served_model": "y"},
        {**base, "top_logprobs": None, "min_p": 0.1},
        {**base, "top_logprobs": 3, "top_k": 0, "repetition_penalty": 1.1},
    ]
    described = []
    for level in ("tokens", "logprobs", "text"):
        described += [prepare_request(json.loads(json.dumps(case)), capture_level=level) for case in cases]
    return [described, [truncating_params(case) for case in cases]]


@scenario
def sampling() -> Any:
    policies: list[Any] = [
        None,
        {"temperature": 1},
        {"temperature": 0.7, "top_k": 0},
        {"temperature": 0.7, "top_p": 1},
        {},
        {"temperature": 0},
        {"temperature": True},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 1, "seed": 3},
        "hot",
    ]
    evaluations: list[Any] = [
        None,
        {},
        {"temperature": 0},
        {"temperature": 3},
        {"top_p": 0},
        {"top_p": 0.5, "top_k": 5},
        {"top_k": 0},
        {"top_k": 1.5},
        {"min_p": 0.1},
        {"temperature": True},
    ]
    kinds = [[purpose, level] for purpose in ("auto", "eval", "train", "play") for level in ("tokens", "text")]
    return [
        [outcome(training_sampling, policy) for policy in policies],
        [outcome(evaluation_sampling, policy) for policy in evaluations],
        [outcome(rollout_type_for, *kind) for kind in kinds],
    ]


@scenario
def keys_and_addresses() -> Any:
    headers: list[dict[str, str]] = [
        {"Authorization": "Bearer abc "},
        {"authorization": "Basic x", "X-Api-Key": "k"},
        {"x-goog-api-key": "g"},
        {},
    ]
    urls = ["http://h:8000", "http://h:8000/", "http://h/v1", "http://h/v1/", "https://h/v1beta/openai"]
    return [
        [extract_api_key(each) for each in headers],
        [clean_session_id(each) for each in ("a", " b ", "-a", "a/b", "", None, 5, "x" * 200)],
        extract_harness_session({"X-Session-Id": "ses_1"}, {}),
        extract_harness_session({}, {"user": "u1", "_session_id": "no good"}),
        [openai_api_base(url) for url in urls],
        [normalise_engine_base(url) for url in urls],
        [auth_headers("k"), auth_headers("k", "x-api-key"), auth_headers(None), auth_headers("k", "")],
        list(Upstream("http://h/", "m", "secret").cache_key),
        "secret" in repr(Upstream("http://h/", "m", "secret")),
        [common_prefix_len([1, 2, 3], [1, 2, 4]), common_prefix_len([], [1]), common_prefix_len([1], [1, 2])],
    ]


@scenario
def dialects_of_requests() -> Any:
    cases: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("/v1/messages", {}, {}),
        ("/v1/chat/completions", {"anthropic-version": "1"}, {}),
        ("/v1/responses", {}, {}),
        ("/v1beta/models/g:generateContent", {}, {}),
        ("/v1beta/models/g:streamGenerateContent", {}, {}),
        ("/x", {"Anthropic-Version": "1"}, {"contents": []}),
        ("/x", {}, {"contents": []}),
        ("/x", {}, {"input": "", "instructions": ""}),
        ("/x", {}, {"input": ""}),
    ]
    found = [detect(*case) for case in cases]
    return [
        [each.value for each in found],
        [extract_model(each, body) for each in found for body in ({}, {"model": "m"})],
    ]


ERRORS: list[Any] = [
    {
        "error": {
            "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use"
            " 'max_completion_tokens' instead.",
            "code": "unsupported_parameter",
            "param": "max_tokens",
        }
    },
    {
        "error": {
            "message": "Unsupported value: 'temperature' does not support 0 with this model.",
            "code": "unsupported_value",
        }
    },
    {"error": {"message": "Unrecognized request argument supplied: return_token_ids", "code": None}},
    {"error": {"message": "Unknown parameter: 'return_token_ids'.", "code": "unknown_parameter"}},
    {"error": {"message": "Function tools are refused; use /v1/responses or set reasoning_effort to 'none'."}},
    {"error": {"message": "`temperature` is deprecated for this model."}},
    {"error": {"message": "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."}},
    {"error": {"message": "Setting 'a' and 'b' at the same time is not supported."}},
    {"error": {"message": "`messages` must not be empty"}},
    {"error": {"message": "Unsupported parameter: 'tools'", "param": "tools"}},
    {"error": {"message": "You are not allowed to request logprobs from this model"}},
    {"error": "Unsupported parameter: 'logprobs' is not supported"},
    "Unknown parameter: `top_k`",
    {"message": "Unsupported value: 'temperature'; use 'temperature' instead", "code": "unsupported_value"},
    None,
    {"error": {}},
    {"error": 5},
]


@scenario
def errors_of_providers() -> Any:
    described: list[Any] = []
    for error in ERRORS:
        fix = diagnose(error)
        if fix is None:
            described.append(None)
            continue
        body = {"max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3, "top_k": 1}
        changed = fix.apply(body)
        described.append([fix.param, fix.replacement, fix.value, fix.action, str(fix), changed, body, fix.apply(body)])
    warnings = behaviour_warnings([ParamFix("temperature"), ParamFix("max_tokens", "x"), "dropped top_p"])
    return [described, [warning.split(":")[0] for warning in warnings]]


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}]},
    {
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "see"}]},
            {"role": "user", "content": "more"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": -1,
        "stop": "x",
    },
    {"messages": [], "response_format": {"type": "json_object"}},
    {"messages": [], "min_p": 0.5},
    {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}]},
    {"messages": [{"role": "assistant", "content": "", "reasoning_content": "so"}]},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
    {"messages": [], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"_openenv_native_request": {"max_tokens": 9, "top_k": -1, "temperature": 1, "top_p": 1, "x": 1}, "max_tokens": 7},
]


@scenario
def anthropic_endpoints() -> Any:
    native = {
        "id": "1",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "so"},
            {"type": "text", "text": "hi"},
            {"type": "tool_use", "id": "2", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 4},
    }
    answers = [outcome(anthropic_response, native), outcome(anthropic_response, {**native, "stop_reason": "refusal"})]
    for answer in answers:
        if isinstance(answer, dict):
            answer.pop("created")
    return [[outcome(anthropic_request, chat, "m") for chat in CHATS], answers]


IMAGE = "data:image/png;base64,AA=="
CONTENTS: list[Any] = [
    "text",
    None,
    5,
    [],
    ["a", {"type": "text", "text": "b"}],
    [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}],
    [{"type": "image_url", "image_url": "https://host/x.png"}],
    [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": IMAGE, "detail": "odd"}],
    [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}],
    [{"type": "image", "source": {"type": "base64", "media_type": "text/plain", "data": "AA=="}}],
    [{"type": "image", "source": {"type": "url", "url": "https://host/x.png"}}],
    [{"type": "document", "source": {"type": "text", "data": "doc"}}, {"type": "thinking", "thinking": "so"}],
    [{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}}],
    [{"text": "a"}, {"thought": True, "text": "so"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}],
    [
        {"file_data": {"mime_type": "image/png", "file_uri": "gs://x"}},
        {"fileData": {"mimeType": "a/b", "fileUri": "x"}},
    ],
]


@scenario
def contents() -> Any:
    both_ways = (
        images.openai_responses_input_content_to_chat,
        images.anthropic_content_to_openai_chat,
        images.google_content_parts_to_openai_chat,
        images.openai_chat_content_to_anthropic_blocks,
        images.openai_chat_content_to_google_parts,
        reasoning.extract_reasoning_from_anthropic_content,
        reasoning.extract_reasoning_from_gemini_parts,
    )
    block = {"image_url": {"url": IMAGE, "detail": "low"}}
    items: list[dict[str, Any]] = [
        {"content": [{"text": "a"}, {"text": "b"}]},
        {"content": [], "summary": [{"text": "c"}]},
        {"encrypted_content": reasoning.encrypt_reasoning("hidden")},
        {"encrypted_content": "foreign"},
    ]
    return [
        [[convert(content) for content in CONTENTS] for convert in both_ways],
        [images.parse_data_url(url) for url in (IMAGE, "https://x", "data:text/plain;base64,AA==")],
        [images.is_image_mime_type(kind) for kind in ("image/PNG", "IMAGE/png", "text/plain", None)],
        [images.make_data_url("image/png", data) for data in ("AA==", IMAGE)],
        [images.openai_image_url(block), images.openai_image_detail(block), images.openai_image_url({})],
        [images.openai_image_url_block("u", detail=detail) for detail in ("low", "odd", None)],
        images.openai_content_from_text_and_images([{"type": "text", "text": "a"}] * 2, text_separator="-"),
        [reasoning.make_signature(text) for text in ("", "so")],
        [reasoning.make_google_signature(text) for text in ("", "so")],
        [reasoning.decrypt_reasoning(text) for text in (reasoning.encrypt_reasoning("so"), "oe:%%", None)],
        [reasoning.extract_reasoning_from_responses_item(item) for item in items],
    ]


FUNCTION = {"name": "f", "description": "do", "parameters": {"type": "object", "properties": {}}}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "anthropic": [
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
        {
            "model": "m",
            "max_tokens": 5,
            "stream": True,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: 1\nbe"},
                {"type": "text", "text": "brief"},
            ],
            "temperature": 0.5,
            "top_k": 4,
            "stop_sequences": ["x"],
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "tools": [{"name": "f", "description": "do", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "any"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "go"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]},
            ],
        },
        {"_served_model": "Qwen/Qwen3.5-9B", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    ],
    "openai_chat": [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5},
        {
            "messages": [
                {"role": "developer", "content": "one"},
                {"role": "user", "content": "hi"},
                {"role": "system", "content": [{"type": "text", "text": "two"}]},
            ]
        },
    ],
    "openai_responses": [
        {"model": "m", "input": "hi"},
        {
            "model": "m",
            "instructions": "be",
            "max_output_tokens": 5,
            "temperature": 0.5,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "ok"},
            ],
        },
    ],
    "google": [
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
        {
            "model": "m",
            "systemInstruction": {"parts": [{"text": "be"}]},
            "generationConfig": {
                "maxOutputTokens": 5,
                "temperature": 0.5,
                "topP": 0.5,
                "topK": 3,
                "stopSequences": ["x"],
            },
            "tools": [{"functionDeclarations": [FUNCTION]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
            "contents": [
                {"role": "user", "parts": [{"text": "go"}]},
                {
                    "role": "model",
                    "parts": [
                        {"thought": True, "text": "so"},
                        {"text": "ok"},
                        {"functionCall": {"id": "1", "name": "f", "args": {"a": 1}}},
                    ],
                },
                {"role": "user", "parts": [{"functionResponse": {"id": "1", "name": "f", "response": {"out": 1}}}]},
            ],
        },
        {"config": {"temperature": 0.1, "systemInstruction": "be"}, "contents": []},
        {"generationConfig": {"responseMimeType": "application/json", "thinkingConfig": {"includeThoughts": True}}},
    ],
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ANSWERS: list[dict[str, Any]] = [
    {"content": "hi"},
    {"content": None, "tool_calls": [CALL]},
    {"content": "hi", "reasoning_content": "so", "tool_calls": [CALL]},
]
NOT_COMPARED = {"id", "created", "created_at", "responseId", "modelVersion", "item_id", "error", "incomplete_details"}
"""Random, of the time, or fields that ours has and the published ones have not."""
MORE = {"cache_creation_input_tokens", "cache_read_input_tokens", "input_tokens_details", "output_tokens_details"}


def plain(value: Any) -> Any:
    """A value without what is not compared; a missing text of parameters is no difference."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: plain(item) for key, item in value.items() if key not in NOT_COMPARED | MORE}
    kept.pop("annotations", None)
    if kept.get("logprobs") in (None, []):
        kept.pop("logprobs", None)
    return kept


def completion(message: dict[str, Any], finish: str) -> dict[str, Any]:
    """A whole chat completion."""
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@scenario
def requests_of_dialects() -> Any:
    manager = TransformManager()
    described = {}
    for name, bodies in REQUESTS.items():
        transformer = manager.get(APIType(name))
        described[name] = [outcome(transformer.transform_request, json.loads(json.dumps(body))) for body in bodies]
        described[f"{name} streams"] = [transformer.is_streaming_request(body) for body in bodies]
    return described


@scenario
def answers_of_dialects() -> Any:
    manager = TransformManager()
    described = {}
    for name in ("anthropic", "openai_chat", "google"):
        transformer = manager.get(APIType(name))
        described[name] = [
            plain(transformer.transform_response(completion(message, finish), {"model": "agents"}))
            for message in ANSWERS
            for finish in ("stop", "length", "tool_calls")
        ]
    responses = manager.get(APIType.OPENAI_RESPONSES)
    for message in ANSWERS:
        answer = responses.transform_response(completion(message, "stop"), {"model": "agents"})
        described[str(message)] = [
            [answer["object"], answer["status"], answer["model"], answer["usage"]["total_tokens"]],
            [[item["type"], item.get("name"), item.get("arguments")] for item in answer["output"]],
            [part["text"] for item in answer["output"] for part in item.get("content") or ()],
        ]
    return described


def told(name: str, events: list[dict[str, Any]]) -> Any:
    """What a client makes of a stream: texts, thoughts, calls and the end."""
    texts, thoughts, arguments, names, ends = "", "", "", [], []
    for event in events:
        delta = event.get("delta") or {}
        if name == "anthropic":
            texts += delta.get("text", "")
            thoughts += delta.get("thinking", "")
            arguments += delta.get("partial_json", "")
            names += [event["content_block"]["name"]] if (event.get("content_block") or {}).get("name") else []
            ends += [delta["stop_reason"]] if delta.get("stop_reason") else []
        elif name == "openai_responses":
            kind = event["type"]
            texts += delta if kind == "response.output_text.delta" else ""
            arguments += delta if kind == "response.function_call_arguments.delta" else ""
            is_call = kind == "response.output_item.added" and event["item"]["type"] == "function_call"
            names += [event["item"]["name"]] if is_call else []
            ends += [kind] if kind == "response.completed" else []
        else:
            for candidate in event["candidates"]:
                for part in candidate["content"]["parts"]:
                    thoughts += part["text"] if part.get("thought") else ""
                    texts += part.get("text", "") if not part.get("thought") else ""
                    names += [part["functionCall"]["name"]] if "functionCall" in part else []
                    arguments += json.dumps(part["functionCall"]["args"]) if "functionCall" in part else ""
                ends += [candidate["finishReason"]] if candidate.get("finishReason") else []
    return [texts, thoughts if name != "openai_responses" else "", arguments, names, ends[-1:]]


@scenario
def streams_of_dialects() -> Any:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "so"},
        {"content": "he"},
        {"content": "llo"},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    described: dict[str, Any] = {}
    for name in ("anthropic", "openai_responses", "google"):
        state = TransformManager().get(APIType(name)).create_stream_state({"model": "m"})
        assert state is not None
        events: list[dict[str, Any]] = []
        for number, chunk in enumerate(json.loads(json.dumps(chunks))):
            events += state.process_chunk(chunk, is_first=number == 0)
        events += state.finalize()
        described[name] = [told(name, events), state.finalize()]
    return described


async def collected(name: str, message: dict[str, Any]) -> str:
    """A replayed stream, whole."""
    transformer = TransformManager().get(APIType(name))
    pieces = sse.replay(APIType(name), transformer, completion(message, "stop"), {"model": "agents"})
    return "".join([piece async for piece in pieces])


@scenario
def replays() -> Any:
    described: dict[str, Any] = {}
    for name in ("anthropic", "openai_responses", "google", "openai_chat"):
        for number, message in enumerate(ANSWERS):
            text = asyncio.run(collected(name, message))
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            found: Any = events if name == "openai_chat" else told(name, events)
            described[f"{name} {number}"] = [found, lines[-1] == "[DONE]", "event: " in text]
    event = {"type": "x", "a": 1}
    return [
        described,
        [sse.response_to_chunk(completion(message, "stop")) for message in ANSWERS],
        [sse.format_events(kind, [event, event]) for kind in APIType],
    ]


@scenario
def functions_of_the_server() -> Any:
    paths = ["/v1/messages/count_tokens", "v1/messages", "/v1beta/models/x:countTokens", "/v1beta/models/x:COUNTTOKENS"]
    targets = ["/v1/messages", "/v1beta/models/x:streamGenerateContent", "/v1beta/models/x:generateContent?alt=sse"]
    limits: list[dict[str, Any]] = [
        {},
        {"max_tokens": 5},
        {"max_tokens": 50},
        {"max_completion_tokens": 90, "max_tokens": 70},
    ]
    tools: list[dict[str, Any]] = [
        {"stream": True, "stream_options": {}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [1], "tool_choice": "auto", "functions": []},
    ]
    answers: list[dict[str, Any]] = [{}, {"usage": None}, {"usage": {"prompt_tokens_details": None, "x": 1}}]
    payloads = [json.loads(json.dumps(answer)) for answer in answers]
    for request in tools:
        server.normalise_for_capture(request)
    for answer in answers:
        server.normalise_response(answer)
    for payload in payloads:
        server.normalise_client_payload(payload, APIType.OPENAI_RESPONSES)
    return [
        [[server.aux_dialect(path), server.is_aux_route(path)] for path in paths],
        [server.aux_token_count_response(dialect, 7) for dialect in ("anthropic", "google")],
        [server.wants_stream(path, body) for path in targets for body in ({}, {"stream": True}, {"stream": 1})],
        [[server.clamp_output_tokens(request, 10), request] for request in limits],
        [server.clamp_output_tokens({}, None), server.clamp_output_tokens({}, 0)],
        [tools, answers, payloads],
        server.approximate_token_count({"messages": [{"role": "user", "content": "x" * 400}]}) // 10,
        server.approximate_token_count({"contents": [{"parts": [{"text": "x" * 400}]}]}) // 10,
        server.approximate_token_count({}),
    ]


if __name__ == "__main__":
    results = {name: run() for name, run in SCENARIOS.items()}
    json.dump(results, sys.stdout, default=repr)
