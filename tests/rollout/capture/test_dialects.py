"""Responses and messages: at endpoints of the same dialect, and translated for those that speak chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from openenv.rollout.capture import CaptureServer
from openenv.rollout.capture.dialects import BRIDGES, DIALECTS
from openenv.rollout.capture.dialects.dialect import CallOptions
from openenv.rollout.capture.encoding import STREAM_DONE, event_data
from openenv.rollout.tasks.task import Model

ANTHROPIC, RESPONSES = DIALECTS["anthropic"], DIALECTS["openai_responses"]

MESSAGE_EVENTS: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {"id": "m1", "role": "assistant", "content": [], "usage": {"input_tokens": 9}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "sig"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "ping"},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    },
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
    {"type": "content_block_stop", "index": 2},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
]

ENTRY = {"token": "Hi", "logprob": -0.25, "bytes": [72, 105], "top_logprobs": []}
PART = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": [ENTRY]}
ITEM = {"id": "i1", "type": "message", "role": "assistant", "status": "completed", "content": [PART]}
CALL = {"id": "i2", "type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
RESPONSE = {
    "id": "r1",
    "object": "response",
    "status": "completed",
    "model": "m",
    "top_logprobs": 5,
    "output": [ITEM, CALL],
    "usage": {"input_tokens": 3, "output_tokens": 12, "total_tokens": 15},
}
RESPONSE_EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "response": {**RESPONSE, "status": "in_progress", "output": [], "usage": None}},
    {"type": "response.output_item.added", "output_index": 0, "item": {**ITEM, "content": []}},
    {
        "type": "response.content_part.added",
        "output_index": 0,
        "content_index": 0,
        "part": {"type": "output_text", "text": ""},
    },
    {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "Hi", "logprobs": [ENTRY]},
    {"type": "response.output_text.done", "output_index": 0, "content_index": 0, "text": "Hi", "logprobs": [ENTRY]},
    {"type": "response.output_item.done", "output_index": 0, "item": ITEM},
    {"type": "response.output_item.added", "output_index": 1, "item": {**CALL, "arguments": ""}},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '{"a":1}'},
    {"type": "response.output_item.done", "output_index": 1, "item": CALL},
    {"type": "response.completed", "response": RESPONSE},
]


def test_messages_pass_through_untouched_and_are_put_together(
    open_agent: Callable[..., Any], engine: Any, fake: Any
) -> None:
    agent = open_agent(dialect="anthropic", disable_thinking=True)
    pieces = [fake.event(one, one["type"]) for one in MESSAGE_EVENTS]
    engine.respond = lambda request: fake.Answer.events(*pieces)
    body = {"model": "x", "max_tokens": 99999, "thinking": {"type": "enabled"}, "messages": [], "stream": True}
    agent.headers = {"x-api-key": agent.capture.key, "anthropic-version": "2023-06-01", "anthropic-beta": "b"}
    assert agent.post("/messages", body).content == b"".join(pieces)
    request = engine.requests[0]
    assert request.path == "/v1/messages"
    assert request.headers["x-api-key"] == "sk-real-secret"
    assert request.headers["anthropic-beta"] == "b"
    assert (request.body["max_tokens"], request.body["model"], "thinking" in request.body) == (
        4096,
        "real-model",
        False,
    )
    (call,) = agent.capture.calls()
    thinking, text, tool = call.response["content"]
    assert (thinking["thinking"], thinking["signature"], text["text"]) == ("hm", "sig", "Hello")
    assert tool["input"] == {"a": 1}
    assert call.completion.finish_reason == "tool_use"
    assert call.completion.usage == {"input_tokens": 9, "output_tokens": 7}
    assert agent.capture.stats().completion_tokens == 7


def test_responses_are_captured_with_log_probabilities_and_shown_without(
    open_agent: Callable[..., Any], engine: Any, fake: Any
) -> None:
    agent = open_agent(dialect="openai_responses")
    pieces = [fake.event(one, one["type"]) for one in RESPONSE_EVENTS]
    engine.respond = lambda request: (
        fake.Answer.events(*pieces) if request.body.get("stream") else fake.Answer.json(RESPONSE)
    )
    events = agent.stream("/responses", {"model": "x", "input": "hi", "stream": True, "max_output_tokens": 9000})
    assert "Hi" in json.dumps(events)
    assert "-0.25" not in json.dumps(events)
    sent = engine.requests[0].body
    assert (sent["include"], sent["top_logprobs"]) == (["message.output_text.logprobs"], 5)
    assert sent["max_output_tokens"] == 4096
    whole = agent.post("/responses", {"model": "x", "input": "hi"}).json()
    assert whole["output"][0]["content"][0]["logprobs"] == []
    assert whole["top_logprobs"] == 0
    for call in agent.capture.calls():
        assert call.completion.sampled.logprobs == (-0.25,)
        assert call.completion.finish_reason == "tool_calls"
        assert call.response["output"][1]["arguments"] == '{"a":1}'


def test_responses_reach_an_agent_that_asked_for_log_probabilities_as_they_are() -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"]}
    done = RESPONSES.rewrite(body, CallOptions(model="m"))
    assert done.forced == frozenset()
    assert RESPONSES.strip_event(RESPONSE_EVENTS[3], done.forced) is RESPONSE_EVENTS[3]


def test_a_response_that_breaks_off_is_put_together_as_far_as_it_got() -> None:
    assembler = RESPONSES.assembler()
    for event in RESPONSE_EVENTS[:4]:
        assembler.feed(event)
    assert not any(map(RESPONSES.is_end, RESPONSE_EVENTS[:4]))
    done = RESPONSES.completion(assembler.response())
    assert (done.sampled.logprobs, done.finish_reason) == ((-0.25,), None)


def test_a_message_that_breaks_off_is_put_together_as_far_as_it_got() -> None:
    assembler = ANTHROPIC.assembler()
    for event in MESSAGE_EVENTS[:12]:
        assembler.feed(event)
    assert not any(map(ANTHROPIC.is_end, MESSAGE_EVENTS[:12]))
    assert assembler.response()["content"][2]["input"] == '{"a":'


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "anthropic"])
def test_a_whole_answer_as_a_stream_is_put_together_to_the_same(name: Any) -> None:
    dialect = DIALECTS[name]
    answer = RESPONSE if name == "openai_responses" else dialect.final_answer({"model": "m"}, "the end")
    events = [event_data(event) for event in dialect.stream({"stream_options": {"include_usage": True}}, answer)]
    chunks = [json.loads(data) for data in events if data and data != STREAM_DONE]
    assembler = dialect.assembler()
    for chunk in chunks:
        assembler.feed(chunk)
    assert sum(map(dialect.is_end, chunks)) == 1
    assert dialect.completion(assembler.response()).finish_reason == dialect.completion(answer).finish_reason
    assert dialect.reply_items(assembler.response()) == dialect.reply_items(answer)


def test_a_recorded_message_as_a_stream_has_its_thoughts_signatures_and_inputs_in_deltas() -> None:
    citation = {"type": "char_location", "cited_text": "x"}
    answer = {
        **ANTHROPIC.final_answer({"model": "m"}, ""),
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "sig"},
            {"type": "redacted_thinking", "data": "hidden"},
            {"type": "text", "text": "Hello", "citations": [citation, {**citation, "cited_text": "y"}]},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "tool_use", "id": "u", "name": "f", "input": '{"a":'},
        ],
    }
    chunks = [json.loads(event_data(event) or b"") for event in ANTHROPIC.stream({}, answer)]
    # Claude Code does the same: what a block holds at its start does not count.
    for chunk in chunks:
        if chunk["type"] == "content_block_start":
            block = chunk["content_block"]
            block.update({name: "" for name in ("text", "thinking", "signature", "input") if name in block})
    assembler = ANTHROPIC.assembler()
    for chunk in chunks:
        assembler.feed(chunk)
    assert assembler.response() == answer


def test_a_recorded_response_as_a_stream_has_the_events_of_each_item() -> None:
    thought = {
        "id": "rs1",
        "type": "reasoning",
        "encrypted_content": "hidden",
        "summary": [{"type": "summary_text", "text": "short"}],
        "content": [{"type": "reasoning_text", "text": "long"}],
    }
    patch = {"id": "i3", "type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"}
    search = {"id": "i4", "type": "web_search_call", "status": "completed"}
    answer = {**RESPONSE, "output": [thought, ITEM, CALL, patch, search]}
    chunks = [json.loads(event_data(event) or b"") for event in RESPONSES.stream({}, answer)]
    done = [chunk["item"] for chunk in chunks if chunk["type"] == "response.output_item.done"]
    assert done == answer["output"]
    assert chunks[-1]["response"] == answer
    deltas = {chunk["type"]: chunk["delta"] for chunk in chunks if "delta" in chunk}
    assert deltas == {
        "response.reasoning_summary_text.delta": "short",
        "response.reasoning_text.delta": "long",
        "response.output_text.delta": "Hi",
        "response.function_call_arguments.delta": '{"a":1}',
        "response.custom_tool_call_input.delta": "*** Begin",
    }
    started = [chunk["item"] for chunk in chunks if chunk["type"] == "response.output_item.added"]
    assert [started[0]["summary"], started[0]["content"], started[2]["arguments"], started[3]["input"]] == [
        [],
        [],
        "",
        "",
    ]
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))


@pytest.mark.parametrize("dialect", ["anthropic", "openai_responses"])
def test_a_recorded_stream_of_a_coding_agent_is_a_stream_again(
    server: CaptureServer, engine: Any, fake: Any, agent_of: Any, dialect: Any
) -> None:
    path, sent = ("/messages", MESSAGE_EVENTS) if dialect == "anthropic" else ("/responses", RESPONSE_EVENTS)
    field = "messages" if dialect == "anthropic" else "input"
    engine.respond = lambda request: fake.Answer.events(*(fake.event(one, one["type"]) for one in sent))
    assemblers = []
    for number in range(2):
        model = Model(base_url=engine.url, name="m", dialect=dialect, top_logprobs=0)
        capture = server.open("r", model) if number == 0 else server.reopen("r", model)
        # The second start of the agent has another session, another process and another clock.
        text = f"Session ID: {number}f0c2b\nToday is 2026-11-{10 + number}. Work in /tmp/work{number}."
        request = {field: [{"role": "user", "content": text}], "metadata": {"user_id": str(number)}, "stream": True}
        assemblers.append(DIALECTS[dialect].assembler())
        for event in agent_of(capture).stream(path, {"model": "x", "max_tokens": 99, **request}):
            assemblers[-1].feed(event)
        stats = capture.stats()
        assert (stats.replayed, stats.divergence) == (number, None)
        capture.close()
    assert len(engine.requests) == 1
    first, again = ({"stop_sequence": None, **each.response()} for each in assemblers)
    assert again == first


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "anthropic"])
def test_errors_have_the_dialects_shape(name: Any) -> None:
    dialect = DIALECTS[name]
    assert "boom" in json.dumps(dialect.error(500, "boom"))
    assert dialect.error_event(500, "boom").endswith(b"\n\n")
    data = json.loads(event_data(dialect.error_event(500, "boom")) or b"")
    assembler = dialect.assembler()
    assembler.feed(data)
    assert "boom" in json.dumps(dialect.completion(assembler.response()).error)


CHAT_DELTAS = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "think"},
    {"content": "I "},
    {"content": "will"},
    {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "write", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"path":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"a"}'}}]},
    {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "patch", "arguments": ""}}]},
    {"tool_calls": [{"index": 1, "function": {"arguments": '{"input":"*** x"}'}}]},
]


def chat_answer(fake: Any, stream: bool) -> Any:
    usage = {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}
    extras = [{"token_ids": [n], "logprobs": {"content": [fake.entry(n)]}} for n in range(1, len(CHAT_DELTAS) + 1)]
    chunks = [fake.chat_chunk(delta, **extra) for delta, extra in zip(CHAT_DELTAS, extras, strict=True)]
    chunks.append(fake.chat_chunk({}, finish="tool_calls"))
    chunks.append({**fake.chat_chunk({}), "choices": [], "usage": usage})
    chunks[0]["prompt_token_ids"] = [4, 5, 6]
    if stream:
        return fake.Answer.events(*(piece for chunk in chunks for piece in (fake.event(chunk), 0.005)), fake.DONE)
    assembler = DIALECTS["openai_chat"].assembler()
    for chunk in chunks:
        assembler.feed(chunk)
    return fake.Answer.json(assembler.response())


ANTHROPIC_BODY: dict[str, Any] = {
    "model": "claude",
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "be good", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "write", "description": "d", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "any"},
    "stop_sequences": ["END"],
    "messages": [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "c9", "name": "write", "input": {"path": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c9", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "next"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            ],
        },
    ],
}


def test_messages_become_chat_completions() -> None:
    sent = BRIDGES["anthropic", "openai_chat"].request(ANTHROPIC_BODY)
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assistant = sent["messages"][2]
    assert assistant["content"] == "ok"
    assert assistant["tool_calls"][0]["function"] == {"name": "write", "arguments": '{"path": "b"}'}
    assert sent["messages"][3] == {"role": "tool", "tool_call_id": "c9", "content": "done"}
    assert sent["messages"][4]["content"][1]["image_url"]["url"] == "data:image/png;base64,AA=="
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["write"]
    assert (sent["tool_choice"], sent["stop"], sent["max_tokens"]) == ("required", ["END"], 32000)


@pytest.mark.parametrize("stream", [True, False])
def test_an_agent_of_the_messages_api_can_use_a_chat_endpoint(agent: Any, engine: Any, fake: Any, stream: bool) -> None:
    engine.respond = lambda request: chat_answer(fake, bool(request.body.get("stream")))
    response = agent.post("/messages", {**ANTHROPIC_BODY, "stream": stream})
    if stream:
        assembler = ANTHROPIC.assembler()
        names = []
        for event in response.text.split("\n\n"):
            if event:
                names.append(event.splitlines()[0].removeprefix("event: "))
                assembler.feed(json.loads(event.splitlines()[1].removeprefix("data: ")))
        assert names[0] == "message_start"
        assert names[-2:] == ["message_delta", "message_stop"]
        message = assembler.response()
    else:
        message = response.json()
    thinking, text, write, patch = message["content"]
    assert (thinking["thinking"], text["text"]) == ("think", "I will")
    assert (write["id"], write["name"], write["input"]) == ("c0", "write", {"path": "a"})
    assert patch["input"] == {"input": "*** x"}
    assert message["stop_reason"] == "tool_use"
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (20, 9)
    assert "logprob" not in response.text
    assert engine.requests[0].path == "/v1/chat/completions"
    assert engine.requests[0].body["max_tokens"] == 4096
    (call,) = agent.capture.calls()
    assert (call.dialect, call.endpoint_dialect) == ("anthropic", "openai_chat")
    assert call.request["system"] == ANTHROPIC_BODY["system"]
    assert call.sent == engine.requests[0].body
    assert call.completion.sampled.ids == tuple(range(1, 10))
    assert call.completion.prompt_ids == (4, 5, 6)


RESPONSES_BODY: dict[str, Any] = {
    "model": "gpt",
    "instructions": "be good",
    "max_output_tokens": 100,
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    "tools": [
        {"type": "function", "name": "write", "description": "d", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "patch", "description": "free text", "format": {"type": "grammar"}},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}, {"type": "input_text", "text": "on"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "call_id": "c8", "name": "write", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c9", "name": "patch", "input": "*** y"},
        {"type": "function_call_output", "call_id": "c8", "output": "done"},
        {"type": "custom_tool_call_output", "call_id": "c9", "output": "patched"},
    ],
}


def test_responses_become_chat_completions() -> None:
    sent = BRIDGES["openai_responses", "openai_chat"].request(RESPONSES_BODY)
    roles = [message["role"] for message in sent["messages"]]
    assert roles == ["system", "system", "user", "assistant", "tool", "tool"]
    assert sent["messages"][2]["content"] == "go\non"
    calls = sent["messages"][3]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ["{}", '{"input": "*** y"}']
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["write", "patch"]
    assert sent["response_format"]["json_schema"]["name"] == "n"
    assert (sent["max_tokens"], sent["tool_choice"], sent["parallel_tool_calls"]) == (100, "auto", False)


@pytest.mark.parametrize("stream", [True, False])
def test_an_agent_of_the_responses_api_can_use_a_chat_endpoint(
    agent: Any, engine: Any, fake: Any, stream: bool
) -> None:
    engine.respond = lambda request: chat_answer(fake, bool(request.body.get("stream")))
    if stream:
        events = agent.stream("/responses", {**RESPONSES_BODY, "stream": True})
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds.count("response.output_text.delta") == 2
        assert kinds[-1] == "response.completed"
        deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
        assert deltas == ['{"path":', '"a"}']
        response = events[-1]["response"]
        assert response["output"] == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    else:
        response = agent.post("/responses", RESPONSES_BODY).json()
    reasoning, message, write, patch = response["output"]
    assert reasoning["content"][0]["text"] == "think"
    assert message["content"][0]["text"] == "I will"
    assert (write["type"], write["call_id"], write["arguments"]) == ("function_call", "c0", '{"path":"a"}')
    assert (patch["type"], patch["call_id"], patch["input"]) == ("custom_tool_call", "c1", "*** x")
    assert (response["status"], response["usage"]["output_tokens"]) == ("completed", 9)
    (call,) = agent.capture.calls()
    assert call.completion.sampled.ids == tuple(range(1, 10))
    assert call.completion.finish_reason == "tool_calls"


def test_a_stream_is_translated_as_it_comes(agent: Any, engine: Any, fake: Any) -> None:
    chunks = [fake.event(fake.chat_chunk({"content": f"w{n} "})) for n in range(4)]
    end = fake.event(fake.chat_chunk({}, finish="length"))
    engine.respond = lambda request: fake.Answer.events(
        *(one for chunk in chunks for one in (chunk, 0.15)), end, fake.DONE
    )
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    seen_while_open = 0
    with agent.client.stream("POST", "/messages", json=body, headers=agent.headers) as response:
        for line in response.iter_lines():
            if "text_delta" in line and agent.capture.calls()[0].ended is None:
                seen_while_open += 1
            if "stop_reason" in line and "message_delta" in line:
                assert '"max_tokens"' in line
    assert seen_while_open == 4


def test_an_error_inside_a_stream_is_translated(agent: Any, engine: Any, fake: Any) -> None:
    first = fake.event(fake.chat_chunk({"content": "a"}))
    engine.respond = lambda request: fake.Answer.events(
        first, fake.event({"error": {"message": "out of memory"}}), fake.DONE
    )
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    assert "event: error" in agent.post("/messages", body).text
    last = agent.stream("/responses", {"model": "m", "input": "hi", "stream": True})[-1]
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "out of memory")
    assert agent.capture.calls()[0].error == {"message": "out of memory"}


def test_tokens_are_counted_by_an_estimate_that_is_no_call(agent: Any, engine: Any) -> None:
    counted = agent.post("/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 400}]}).json()
    assert 100 <= counted["input_tokens"] <= 110
    counted = agent.post("/responses/input_tokens", {"input": "x" * 400}).json()
    assert counted["input_tokens"] == 100
    assert engine.requests == []
    assert agent.capture.calls() == []


def test_an_endpoint_without_a_bridge_from_the_agents_dialect_is_refused(
    open_agent: Callable[..., Any], engine: Any
) -> None:
    agent = open_agent(dialect="openai_responses")
    response = agent.chat()
    assert response.status_code == 400
    assert "openai_responses" in response.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/messages", "/responses"])
@pytest.mark.parametrize("body", [{"messages": "x", "input": 5}, {"messages": [1], "input": [1]}, {}, {"tools": [1]}])
def test_a_malformed_request_is_refused_without_a_crash(agent: Any, path: str, body: Any) -> None:
    response = agent.post(path, body)
    assert response.status_code in (200, 400)
    assert agent.chat().status_code == 200
