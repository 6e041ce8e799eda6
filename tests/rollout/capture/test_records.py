"""Records that are held in memory equal those on disk, and the short ways through conversations change nothing."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout.capture import graph, read
from openenv.rollout.capture.dialects import DIALECTS
from openenv.rollout.capture.records import FILE, Call, Recorder, RecordingBuilder

FACTS = {"dialect": "openai_chat", "to": "openai_chat", "path": "/v1/chat/completions"}


def recorder_in(folder: Path) -> tuple[Recorder, RecordingBuilder]:
    recorder = Recorder(folder / FILE)
    held = recorder.hold()
    recorder.create({"rollout_id": "r"})
    return recorder, held


def record(recorder: Recorder, request: dict[str, Any], prompt: list[int], sampled: list[int], how: str) -> None:
    """Record a call whose answer has the sampled tokens."""
    entries = [{"token": f"t{token}", "logprob": -0.5} for token in sampled]
    message = {"role": "assistant", "content": " ".join(f"t{token}" for token in sampled)}
    choice = {"message": message, "logprobs": {"content": entries}, "token_ids": sampled, "finish_reason": "stop"}
    answer = {"choices": [{"index": 0, **choice}]}
    call = recorder.begin(FACTS, request, {**request, "logprobs": True})
    call.head(200, {})
    call.prompt(prompt)
    call.body(json.dumps(answer).encode(), answer)
    call.completed(DIALECTS["openai_chat"].completion(answer))
    call.end(how, {})


def changed_messages(draw: random.Random, messages: list[Any]) -> list[Any]:
    """Return a conversation that continues another one, or differs from it somewhere."""
    messages = copy.deepcopy(messages)
    for _ in range(draw.randint(1, 3)):
        flag = draw.choice([1, 1.0, True, "x"])  # equal in Python, and not in JSON
        messages.append(
            draw.choice(
                [
                    {"role": "user", "content": f"text {draw.randint(0, 5)}"},
                    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "value": flag}]},
                    {"role": "user", "content": [{"type": "text", "text": "a", "flag": flag}]},
                ]
            )
        )
    if draw.random() < 0.5:
        place = draw.randrange(len(messages))
        messages[place] = {"role": draw.choice(["user", "tool"]), "content": draw.choice(["text 1", "other"])}
    return messages


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_the_same_in_memory_on_disk_and_as_they_were_sent(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    recorder, held = recorder_in(tmp_path)
    messages: list[Any] = [{"role": "system", "content": "Begin."}]
    sent: list[dict[str, Any]] = []
    for number in range(8):
        messages = changed_messages(draw, messages)
        sent.append({"model": "m", "messages": copy.deepcopy(messages), "temperature": number})
        record(recorder, copy.deepcopy(sent[-1]), [1, number], [7], "complete")
    in_memory, on_disk = held.whole().calls, read(tmp_path).calls
    for request, one, other in zip(sent, in_memory, on_disk, strict=True):
        assert json.dumps(one.request) == json.dumps(other.request) == json.dumps(request)
        assert one.sent_parameters == {"model": "m", "temperature": request["temperature"], "logprobs": True}
        assert one.completion == other.completion


def without_history(call: Call) -> Call:
    """Return a call whose prompt does not refer to other prompts, so that only its tokens can link it."""
    return replace(call, completion=replace(call.completion, prompt_ids=tuple(call.completion.prompt_ids or ())))


def links(calls: list[Call]) -> list[tuple[int, int | None, bool]]:
    built = graph.build(calls)
    return [(node.number, node.parent.number if node.parent else None, node.discarded) for node in built.nodes]


@pytest.mark.parametrize("seed", range(30))
def test_recorded_prompts_link_calls_as_their_tokens_do(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    recorder, held = recorder_in(tmp_path)
    turns: list[list[int]] = []
    for number in range(8):
        is_chain = seed < 8 or draw.random() < 0.6
        before = turns[-1] if turns and is_chain else draw.choice([[], *turns])
        prompt = [*before, *(draw.randint(0, 2) for _ in range(draw.randint(0 if seed % 2 else 1, 3)))] or [9]
        sampled = [draw.randint(0, 2) for _ in range(draw.randint(1, 3))]
        request = {"model": "m", "messages": [{"role": "user", "content": f"{number} {prompt}"}]}
        record(recorder, request, prompt, sampled, "complete" if draw.random() < 0.8 else "agent_gone")
        turns.append([*prompt, *sampled])
    calls = held.whole().calls
    assert links(calls) == links([without_history(call) for call in calls])
    if seed < 8 and seed % 2 == 0:
        assert [parent for _, parent, _ in links(calls)] == [None, 1, 2, 3, 4, 5, 6, 7]
