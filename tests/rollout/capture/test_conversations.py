"""Conversations as chat messages: the agent's own ones, in one form for all dialects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout.capture import read
from openenv.rollout.capture.records import Call, Recording
from openenv.rollout.capture.transcript import conversations
from stored_rollouts import write_square


def recording(dialect: Any, body: dict[str, Any], answer: dict[str, Any] | None, ended: str = "complete") -> Recording:
    call = Call(1, dialect, dialect, "", streamed=False, packed_request=body, packed_sent=body, started_at=0.0)
    call.answer, call.ended = answer, ended
    return Recording("r", Path(), calls=[call])


def test_titles_and_abandoned_answers_are_left_out(tmp_path: Path) -> None:
    captured = read(write_square(tmp_path, "r"))
    (conversation,) = conversations(captured)
    last = captured.calls[-1]
    assert conversation.messages[:-1] == last.sent["messages"]
    assert [message["role"] for message in conversation.messages[: conversation.opening]] == ["system", "user"]
    assert conversation.messages[conversation.opening]["tool_calls"][0]["function"]["name"] == "write"
    assert conversation.messages[-1]["role"] == "assistant"
    assert conversation.tools == last.sent["tools"]


CALL = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "README"}]}
ANTHROPIC = {
    "system": "Be good.",
    "tools": [{"name": "bash", "description": "Run it.", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, CALL]},
        {"role": "user", "content": [RESULT]},
    ],
}
RESPONSES = {
    "instructions": "Be good.",
    "tools": [{"type": "function", "name": "bash", "description": "Run it.", "parameters": {"type": "object"}}],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "name": "bash", "call_id": "t1", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "README"},
    ],
}
ANSWERS: dict[str, dict[str, Any]] = {
    "anthropic": {"role": "assistant", "content": [{"type": "text", "text": "One file."}]},
    "openai_responses": {
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One file."}]},
        ]
    },
}


@pytest.mark.parametrize(("dialect", "body"), [("anthropic", ANTHROPIC), ("openai_responses", RESPONSES)])
def test_other_dialects_become_chat_messages(dialect: str, body: dict[str, Any]) -> None:
    (conversation,) = conversations(recording(dialect, body, ANSWERS[dialect]))
    system, user, called, result, answer = conversation.messages
    assert (system, user) == ({"role": "system", "content": "Be good."}, {"role": "user", "content": "hi"})
    assert (called["role"], called["content"], called["reasoning_content"]) == ("assistant", "", "hm")
    (call,) = called["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("t1", "bash")
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"}
    assert result == {"role": "tool", "tool_call_id": "t1", "content": "README"}
    assert answer == {"role": "assistant", "content": "One file."}
    function = {"name": "bash", "description": "Run it.", "parameters": {"type": "object"}}
    assert conversation.tools == [{"type": "function", "function": function}]


def test_a_conversation_without_a_whole_answer_is_left_out() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    half = {"choices": [{"message": {"role": "assistant", "content": "I"}}]}
    assert conversations(recording("openai_chat", body, half, ended="broken")) == []
    assert conversations(recording("openai_chat", body, None)) == []
    assert len(conversations(recording("openai_chat", body, half))) == 1


def test_a_text_that_is_too_long_for_a_transcript_is_not_cut() -> None:
    body = {**ANTHROPIC, "system": "x" * 300_000}
    assert conversations(recording("anthropic", body, ANSWERS["anthropic"])) == []
