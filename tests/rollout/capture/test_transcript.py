"""Transcripts: each message once, how calls hang together, tokens with their mask, and what is not to be believed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout.capture import read
from openenv.rollout.capture.records import Call, Recording
from openenv.rollout.capture.transcript import entropy, token_documents, transcript
from stored_rollouts import PIXEL, SYSTEM, Talk, write_square


def test_each_message_is_there_once_with_the_call_that_brought_it(tmp_path: Path) -> None:
    title, first, discarded, again, last = transcript(read(write_square(tmp_path, "r"))).turns
    assert [(message.role, [part.kind for part in message.parts]) for message in first.messages] == [
        ("system", ["text"]),
        ("user", ["text"]),
    ]
    assert [part.kind for part in first.reply.parts] == ["reasoning", "text", "call"]
    assert (first.reply.parts[2].name, json.loads(first.reply.parts[2].text)["path"]) == ("write", "square.py")
    assert [(message.role, [part.kind for part in message.parts]) for message in again.messages] == [
        ("tool", ["result"]),
        ("user", ["text", "image"]),
    ]
    assert again.messages[0].parts[0].call_id == first.reply.parts[2].call_id
    assert again.messages[1].parts[1].text == PIXEL
    assert [part.text for message in last.messages for part in message.parts] == ["And?"]
    assert [turn.branch for turn in (title, first, discarded, again, last)] == [
        "auxiliary",
        "main",
        "retry",
        "main",
        "main",
    ]
    assert [turn.parent for turn in (first, discarded, again, last)] == [None, 2, 2, 4]


def test_tokens_have_probabilities_entropies_and_the_mask_of_the_exported_sequences(tmp_path: Path) -> None:
    told = transcript(read(write_square(tmp_path, "r")))
    _, first, discarded, _, _ = told.turns
    assert told.level == "tokens"
    assert first.sampled_tokens == first.trained_tokens == len(first.tokens) > 5
    assert (discarded.trained_tokens, all(not token.is_trained for token in discarded.tokens)) == (0, True)
    token = first.tokens[2]
    assert token.logprob == pytest.approx(math.log(0.2))
    assert token.entropy == pytest.approx(-(0.2 * math.log(0.2) + 2 * 0.4 * math.log(0.4)))
    assert first.mean_entropy is not None
    assert first.mean_logprob is not None
    assert token_documents(first)[2] == {
        "t": token.text,
        "i": token.token_id,
        "p": round(math.log(0.2), 5),
        "h": round(token.entropy or 0, 5),
        "m": 1,
        "a": [[token.text, round(math.log(0.2), 4)], ["or ", round(math.log(0.4), 4)]],
    }
    assert "tokens" not in told.document()["turns"][0]
    json.dumps(told.document())


def test_a_shorter_conversation_is_a_compaction_and_one_beside_it_a_sub_agent(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "r")
    question = [SYSTEM, {"role": "user", "content": "go"}]
    answer, ids = talk.call(question, [1, 2], "one")
    talk.call([{"role": "system", "content": "You explore."}, question[1]], [9, 9], "found")
    talk.call([*question, answer, {"role": "user", "content": "on"}], [*ids, 3], "two")
    talk.call([SYSTEM, {"role": "user", "content": "Summary: one, two."}], [1, 5], "three")
    assert [turn.branch for turn in transcript(read(tmp_path)).turns] == ["main", "sub-agent", "main", "compaction"]


def test_an_answer_that_the_agent_rewrote_is_shown(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "r")
    question = [SYSTEM, {"role": "user", "content": "go"}]
    _, ids = talk.call(question, [1, 2], "secret plan")
    edited = {"role": "assistant", "content": "another plan"}
    talk.call([*question, edited, {"role": "user", "content": "on"}], [*ids, 3], "two")
    _, second = transcript(read(tmp_path)).turns
    assert [message.role for message in second.messages] == ["assistant", "user"]
    assert second.messages[0].parts[0].text == "another plan"


ANTHROPIC: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be good."}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                }
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                {"type": "image", "source": {"type": "url", "url": "https://elsewhere.example/x.png"}},
            ],
        },
    ],
}
RESPONSES: dict[str, Any] = {
    "instructions": "Be good.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "name": "Bash", "call_id": "t1", "arguments": '{"cmd": "ls"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "no"},
        {"type": "web_search_thing", "query": "x"},
    ],
}


@pytest.mark.parametrize(
    ("dialect", "body", "roles", "kinds"),
    [
        (
            "anthropic",
            ANTHROPIC,
            ["system", "user", "assistant", "tool", "user"],
            ["text", "text", "reasoning", "call", "result", "image", "other"],
        ),
        (
            "openai_responses",
            RESPONSES,
            ["system", "user", "assistant", "assistant", "tool", "assistant"],
            ["text", "text", "reasoning", "call", "result", "other"],
        ),
    ],
)
def test_the_other_dialects_are_read_as_the_same_parts(
    dialect: Any, body: dict[str, Any], roles: list[str], kinds: list[str]
) -> None:
    call = Call(1, dialect, dialect, "", streamed=False, packed_request=body, packed_sent=body, started_at=0.0)
    [turn] = transcript(Recording("r", Path(), calls=[call])).turns
    assert [message.role for message in turn.messages] == roles
    parts = [part for message in turn.messages for part in message.parts]
    assert [part.kind for part in parts] == kinds
    result = next(part for part in parts if part.kind == "result")
    assert (result.text, result.call_id, result.is_error) == ("no", "t1", dialect == "anthropic")


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "messages",
    [
        "no list",
        [None, 7, "text"],
        [{"role": {"a": 1}, "content": {"b": 2}}],
        [
            {
                "role": "user",
                "content": [7, None, {"type": 7}, {"type": "image_url", "image_url": "javascript:alert(1)"}],
            }
        ],
        [{"role": "user", "content": [{"type": "odd", "x": nested(5000)}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": 7, "arguments": nested(5000)}}, 8]}],
        [{"role": "user", "content": [{"type": "odd", "n": 10**6000}]}],
    ],
)
def test_whatever_an_agent_sends_can_be_shown(messages: Any) -> None:
    body = {"messages": messages, "tools": [{"name": None}, 3]}
    call = Call(
        1, "openai_chat", "openai_chat", "", streamed=False, packed_request=body, packed_sent=body, started_at=0.0
    )
    told = transcript(Recording("r", Path(), calls=[call])).document()
    json.dumps(told)
    images = [part for turn in told["turns"] for message in turn["messages"] for part in message["parts"]]
    assert not any(part["kind"] == "image" for part in images)


def test_a_long_text_is_cut_and_says_so() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 300_000}]}
    call = Call(
        1, "openai_chat", "openai_chat", "", streamed=False, packed_request=body, packed_sent=body, started_at=0.0
    )
    [turn] = transcript(Recording("r", Path(), calls=[call])).turns
    part = turn.messages[0].parts[0]
    assert (len(part.text), part.cut) == (200_000, 100_000)


def test_what_is_left_of_the_probability_counts_as_one_alternative() -> None:
    assert entropy([]) is None
    assert entropy([("a", 0.0)]) == 0.0
    assert entropy([("a", math.log(0.5))]) == pytest.approx(math.log(2))
