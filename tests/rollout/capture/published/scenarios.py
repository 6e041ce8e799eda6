"""What the published names do with the same values: run by an interpreter of each package, which prints JSON.

Only names of the published package are used here. Texts are the packages' own, so findings are compared by their codes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from openenv.core.harness.capture import RolloutGraph, TurnNode, contract
from openenv.core.harness.capture.compat import ParamFix, behaviour_warnings, diagnose
from openenv.core.harness.capture.detection import detect, extract_model
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


if __name__ == "__main__":
    results = {name: run() for name, run in SCENARIOS.items()}
    json.dump(results, sys.stdout, default=repr)
