"""Malformed values of endpoints and agents are recorded, read back and exported, and nothing breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openenv.rollout.capture import export, read
from openenv.rollout.capture.dialects import BRIDGES, DIALECTS
from openenv.rollout.capture.dialects.dialect import MALFORMED
from openenv.rollout.capture.records import Recorder
from openenv.rollout.capture.stream_tap import StreamTap

KEYS = [
    "choices",
    "delta",
    "content",
    "role",
    "tool_calls",
    "index",
    "function",
    "name",
    "arguments",
    "logprobs",
    "token",
    "finish_reason",
    "token_ids",
    "id",
    "prompt_token_ids",
    "usage",
    "completion_tokens",
    "type",
    "message",
    "text",
    "item",
    "output",
    "part",
    "error",
    "response",
    "messages",
    "input",
    "tools",
    "output_index",
    "content_index",
    "reasoning_content",
    "system",
    "include",
    "stream",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)
EVENT_TYPES = st.sampled_from(
    ["response.output_text.delta", "content_block_delta", "response.completed", "message_start"]
)
CHUNKS = st.builds(lambda value, kind: {**value, "type": kind}, OBJECTS, EVENT_TYPES) | OBJECTS


@pytest.mark.parametrize("agent", sorted(DIALECTS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=OBJECTS, chunks=st.lists(CHUNKS, max_size=4), forced=st.booleans())
def test_a_stream_of_any_values_is_recorded_and_read(
    tmp_path: Path, agent: Any, body: dict[str, Any], chunks: list[dict[str, Any]], forced: bool
) -> None:
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
    recorder = Recorder(file)
    recorder.create({"rollout_id": "r"})
    call = recorder.begin({"dialect": agent, "to": agent, "path": "/"}, body, {**body, "model": "m"})
    names = frozenset({"logprobs", "return_token_ids", "stream_options"}) if forced else frozenset()
    tap = StreamTap(call, DIALECTS[agent], names)
    call.head(200, {})
    for chunk in chunks:
        tap.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    call.end("complete", {})
    recording = read(file)
    (made,) = recording.calls
    assert made.request == body
    sampled = made.completion.sampled
    assert len(sampled.ids) == len(sampled.logprobs) == len(sampled.texts)
    export.turns(recording)
    for sequence in export.sequences(recording):
        assert len(sequence.input_ids) == len(sequence.loss_mask) == len(sequence.logprobs)
    json.dumps(export.document(recording, include_messages=True))


@pytest.mark.parametrize("pair", sorted(BRIDGES))
@settings(max_examples=60, deadline=None)
@given(body=OBJECTS, chunks=st.lists(OBJECTS, max_size=4))
def test_a_bridge_reads_any_value_or_raises_malformed(pair: Any, body: Any, chunks: Any) -> None:
    bridge = BRIDGES[pair]
    try:
        bridge.request(body)
        translator = bridge.translator(body)
        for chunk in chunks:
            translator.feed(chunk)
        assert translator.end().endswith(b"\n\n")
    except MALFORMED:
        pass


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": 5},
        {"choices": [None]},
        {"choices": [{"message": 3, "logprobs": 4, "token_ids": "x"}]},
        {"choices": [{"message": {"tool_calls": 4}}], "usage": "many"},
        {},
    ],
)
def test_an_answer_of_an_odd_shape_is_recorded_and_the_rollout_can_be_exported(
    agent: Any, engine: Any, fake: Any, answer: Any
) -> None:
    engine.respond = lambda request: fake.Answer.json(answer)
    for path in ("/chat/completions", "/messages", "/responses"):
        body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 5}
        assert agent.post(path, body).status_code in (200, 502)
    recording = agent.capture.recording()
    assert [call.response for call in recording.calls] == [answer] * 3
    json.dumps(export.document(recording))


def test_an_agents_own_value_that_looks_like_a_number_of_an_item_is_recorded_as_it_is(agent: Any) -> None:
    odd = {"$item": 99}
    assert agent.chat(metadata=odd, system=odd, input={"$plain": odd}).status_code == 200
    (call,) = agent.capture.calls()
    assert (call.request["metadata"], call.request["system"]) == (odd, odd)
    assert call.request["input"] == {"$plain": odd}
