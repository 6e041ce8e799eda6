"""The memory of an episode grows with its tokens and messages, not with the square of its turns."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout.capture import export
from openenv.rollout.capture.graph import build
from openenv.rollout.capture.records import FILE, PromptIds, Recorder, Recording, read

TURN_TOKENS, ANSWER_TOKENS = 40, 10
FEW, MANY = 50, 200


def message(number: int) -> dict[str, Any]:
    return {"role": "assistant" if number % 2 else "user", "content": f"message {number}"}


def ids_of(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + TURN_TOKENS // 2))


def record(folder: Path, turns: int, *, rewrites: bool = False) -> tuple[Path, Callable[[], Recording]]:
    """Record an episode in which each prompt continues the last one; with `rewrites`, each changes the last answer."""
    recorder = Recorder(folder / FILE)
    held = recorder.hold()
    recorder.create({"rollout_id": "r", "metadata": {}, "model": {}, "budget": {}})
    facts = {"dialect": "openai_chat", "to": "openai_chat", "path": "/v1/chat/completions", "not_trainable": []}
    for turn in range(turns):
        request = {"model": "m", "messages": [message(number) for number in range(2 * turn + 1)]}
        prompt = [token for number in range(2 * turn + 1) for token in ids_of(number)]
        if rewrites and turn:
            prompt[-TURN_TOKENS // 2 - 1] += 500
        sampled = ids_of(2 * turn + 1)[:ANSWER_TOKENS]
        entries = [{"token": f"t{token}", "logprob": -0.5} for token in sampled]
        choice = {"message": message(2 * turn + 1), "token_ids": sampled, "logprobs": {"content": entries}}
        call = recorder.begin(facts, request, {**request, "logprobs": True})
        call.head(200, {})
        call.prompt(prompt)
        answer = {"choices": [{**choice, "index": 0, "finish_reason": "stop"}]}
        call.body(json.dumps(answer).encode(), answer)
        call.end("complete", {"attempts": 1})
    return folder, held.whole


def memory_of(make: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that the result of a function takes, and the most bytes while it is made."""
    tracemalloc.start()
    try:
        made = make()
        size, peak = tracemalloc.get_traced_memory()
        del made
        return size, peak
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rewrites", [False, True], ids=["continued", "rewritten"])
def test_four_times_the_turns_take_about_four_times_the_memory(tmp_path: Path, rewrites: bool) -> None:
    sizes, peaks = [], []
    for turns in (FEW, MANY):
        folder, _ = record(tmp_path / str(turns), turns, rewrites=rewrites)
        size, _ = memory_of(lambda folder=folder: read(folder))
        recording = read(folder)
        _, peak = memory_of(lambda recording=recording: (export.turns(recording), build(recording.calls)))
        sizes.append(size)
        peaks.append(peak)
    assert sizes[1] < 6 * sizes[0]
    assert peaks[1] < 6 * peaks[0]


def test_calls_held_in_memory_take_memory_for_their_own_tokens_only(tmp_path: Path) -> None:
    def held(turns: int) -> object:
        return record(tmp_path / str(turns), turns)[1]

    small, _ = memory_of(lambda: held(FEW))
    large, _ = memory_of(lambda: held(MANY))
    assert large < 6 * small


def test_the_tokens_of_a_long_episode_are_the_same_from_memory_and_from_the_disk(tmp_path: Path) -> None:
    folder, held = record(tmp_path, 100)
    (sequence,) = export.sequences(held())
    assert [sequence] == export.sequences(read(folder))
    assert sequence.input_ids[: TURN_TOKENS // 2] == ids_of(0)
    assert len(sequence.turn_lengths) == 100
    assert sum(sequence.loss_mask) == 100 * ANSWER_TOKENS


def test_prompts_share_the_beginning_of_other_prompts() -> None:
    first = PromptIds([1, 2, 3])
    second = PromptIds([4, 5], first, 3)
    fork = PromptIds([9], second, 2)  # only IDs of the first
    last = PromptIds([], second, 4)
    assert [list(each) for each in (second, fork, last)] == [[1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3, 4]]
    assert (len(second), second[-1], second[1:3]) == (5, 5, (2, 3))
    assert second == (1, 2, 3, 4, 5) == second
    assert second != (1, 2, 3, 4)
    assert fork.tobytes() == PromptIds([1, 2, 9]).tobytes()
    assert hash(last) == hash((1, 2, 3, 4))
