"""Capture against a real engine: ids and log-probabilities are the engine's own, for every turn.

SmolLM2-135M, served by llama.cpp. Every captured token is put through the engine once more: what it says of its
log-probability then is what was captured, within float error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from openenv.rollout.capture import Call, Capture, CaptureServer
from openenv.rollout.tasks.task import Model, Sampling

pytestmark = pytest.mark.slow

QUESTIONS = (
    "Tell me about the sea in one sentence.",
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Name three fruits — and one süß word.",
)
FLOAT_ERROR = 5e-4
"""The engine computes prompts in batches and answers token by token: sums come in another order."""


@pytest.fixture
def open_capture(tmp_path: Path) -> Iterator[Callable[[str], tuple[str, Capture]]]:
    """Open captures in front of an address; give the address for the agent and the capture."""
    with CaptureServer(tmp_path / "records") as server:

        def start(url: str) -> tuple[str, Capture]:
            number = len(list((tmp_path / "records").glob("*")))
            model = Model(
                base_url=f"{url}/v1",
                name="smollm2-135m-instruct",
                engine="llamacpp",
                top_logprobs=2,
                max_tokens_cap=48,
                sampling=Sampling(),
                agent_may_set=("seed",),
            )
            return f"{server.url}/v1", server.open(f"rollout-{number}", model)

        yield start


def prompt_of(engine: Any, call: Call) -> list[int]:
    """Return the tokens of a call's prompt: those that the proxy sent, or those of the engine's template."""
    if call.reused_ids:
        return list(call.completion.prompt_ids or ())
    ids: list[int] = engine.prompt_ids(call.request)
    return ids


def ask(
    url: str, key: str, messages: list[dict[str, str]], *, stream: bool, seed: int, limit: int | None = None
) -> str:
    """Ask as an agent does, and return the text of the answer; nothing that was forced into the call is in it."""
    body = {"model": "any", "messages": messages, "stream": stream, "seed": seed, "max_tokens": limit}
    headers = {"authorization": f"Bearer {key}"}
    with httpx2.Client(timeout=120, trust_env=False, headers=headers) as http:
        if not stream:
            reply = http.post(f"{url}/chat/completions", json=body).json()
            assert not reply["choices"][0].get("logprobs")
            return str(reply["choices"][0]["message"]["content"])
        text = ""
        with http.stream("POST", f"{url}/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    assert "logprob" not in line
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        return text


def converse(url: str, key: str, *, stream: bool) -> list[str]:
    messages: list[dict[str, str]] = []
    answers = []
    for seed, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        answers.append(ask(url, key, messages, stream=stream, seed=seed))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("stream", [True, False])
def test_every_turns_ids_and_log_probabilities_are_the_engines(
    engine: Any, open_capture: Callable[[str], tuple[str, Capture]], stream: bool
) -> None:
    url, capture = open_capture(engine.url)
    answers = converse(url, capture.key, stream=stream)
    turns, calls = capture.turns(), capture.calls()
    assert len(turns) == len(QUESTIONS)
    worst, from_scratch, tokens = 0.0, 0.0, 0
    for turn, call, answer in zip(turns, calls, answers, strict=True):
        ids, logprobs = turn.completion_token_ids, turn.per_token_logps
        ended = turn.finish_reason == "stop"
        # The engine leaves the token that ends an answer out of streams. Answers to token IDs come whole.
        unsent = ended and stream and not call.reused_ids
        assert len(ids) == len(logprobs) == len(turn.completion_tokens)
        assert len(ids) == call.completion.usage["completion_tokens"] - unsent
        assert engine.text(ids[:-1] if ended and not unsent else ids) == answer
        prompt = prompt_of(engine, call)
        assert len(prompt) == call.completion.usage["prompt_tokens"]
        again = engine.replay(prompt, ids)
        worst = max(worst, *(abs(one - other) for one, other in zip(logprobs, again, strict=True)))
        for place in {0, len(ids) // 2, len(ids) - 1}:
            again = engine.logprob(prompt + ids[:place], ids[place], from_scratch=True)
            from_scratch = max(from_scratch, abs(again - logprobs[place]))
        tokens += len(ids)
    sys.stdout.write(
        f"\n{'streamed' if stream else 'whole'}: {len(turns)} turns, {tokens} tokens, largest difference {worst:.1e}, "
        f"from scratch (3 tokens a turn) {from_scratch:.1e}\n"
    )
    assert max(worst, from_scratch) < FLOAT_ERROR


def test_prompt_ids_that_answers_omit_are_requested_from_the_engine(
    engine: Any, open_capture: Callable[[str], tuple[str, Capture]]
) -> None:
    url, capture = open_capture(engine.url)
    ask(url, capture.key, [{"role": "user", "content": QUESTIONS[0]}], stream=True, seed=0)
    (call,) = capture.calls()
    assert call.prompt_ids_asked
    assert list(call.completion.prompt_ids or ()) == engine.prompt_ids(call.request)
    assert len(capture.sequences()) == 1


def test_with_prompt_ids_a_conversation_becomes_sequences_that_the_engine_agrees_with(
    engine: Any, open_capture: Callable[[str], tuple[str, Capture]]
) -> None:
    url, capture = open_capture(engine.front_url)
    converse(url, capture.key, stream=True)
    for call in capture.calls():
        assert list(call.completion.prompt_ids or ()) == prompt_of(engine, call)
    sequences = [sequence for sequence in capture.sequences() if sequence.role != "discarded"]
    assert sum(sequence.n_turns for sequence in sequences) >= len(QUESTIONS)
    worst, tokens = 0.0, 0
    for sequence in sequences:
        assert len(sequence.input_ids) == len(sequence.loss_mask) == len(sequence.logprobs)
        for place, (token, trained) in enumerate(zip(sequence.input_ids, sequence.loss_mask, strict=True)):
            if trained:
                again = engine.logprob(sequence.input_ids[:place], token)
                worst = max(worst, abs(again - sequence.logprobs[place]))
                tokens += 1
    sampled = sum(len(turn.completion_token_ids) for turn in capture.turns())
    linked = sum(sequence.n_turns - 1 for sequence in sequences)
    sys.stdout.write(
        f"\nsequences: {len(sequences)}, turns linked by exact prefix: {linked} of {len(QUESTIONS) - 1}, "
        f"trainable tokens {tokens} of {sampled} sampled, largest difference {worst:.1e}"
    )
    assert tokens == sampled
    assert worst < FLOAT_ERROR


def test_answers_that_the_template_writes_in_other_tokens_stay_in_one_sequence(
    engine: Any, open_capture: Callable[[str], tuple[str, Capture]]
) -> None:
    url, capture = open_capture(engine.url)
    messages: list[dict[str, str]] = []
    for seed in range(4):
        messages.append({"role": "user", "content": QUESTIONS[seed]})
        answer = ask(url, capture.key, messages, stream=seed == 1, seed=seed, limit=12)
        # Agents change the space around an answer, and the template writes what they send.
        messages.append({"role": "assistant", "content": f"\n{answer} "})
    (sequence,) = capture.sequences()
    worst = max(
        abs(engine.logprob(sequence.input_ids[:place], sequence.input_ids[place]) - sequence.logprobs[place])
        for place, bit in enumerate(sequence.loss_mask)
        if bit
    )
    sys.stdout.write(f"\ntoken-in: {sequence.n_trainable} tokens, largest difference {worst:.1e}\n")
    assert [call.reused_ids > 0 for call in capture.calls()] == [False, True, True, True]
    assert sequence.n_trainable == sum(len(turn.completion_token_ids) for turn in capture.turns())
    assert sequence.n_turns == 4
    assert worst < FLOAT_ERROR


def test_a_stream_that_the_agent_leaves_is_captured_exactly(
    engine: Any, open_capture: Callable[[str], tuple[str, Capture]]
) -> None:
    url, capture = open_capture(engine.url)
    messages = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    body = {"model": "any", "messages": messages, "stream": True, "seed": 7, "temperature": 1.0}
    seen = 0
    with httpx2.Client(timeout=120, trust_env=False, headers={"authorization": f"Bearer {capture.key}"}) as http:
        with http.stream("POST", f"{url}/chat/completions", json=body) as response:
            for line in response.iter_lines():
                seen += line.startswith("data: {")
                if seen == 10:
                    break
    capture.revoke()
    (turn,), (call,) = capture.turns(), capture.calls()
    ids, logprobs = turn.completion_token_ids, turn.per_token_logps
    assert len(ids) == len(logprobs) >= 8
    again = engine.replay(engine.prompt_ids(call.request), ids)
    assert max(abs(one - other) for one, other in zip(logprobs, again, strict=True)) < FLOAT_ERROR


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/messages", {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 24}),
        ("/responses", {"input": QUESTIONS[0], "max_output_tokens": 24}),
    ],
)
def test_agents_that_speak_other_dialects_are_captured_exactly_too(
    engine: Any,
    open_capture: Callable[[str], tuple[str, Capture]],
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    url, capture = open_capture(engine.front_url)
    headers = {"authorization": f"Bearer {capture.key}"}
    with httpx2.Client(timeout=120, trust_env=False, headers=headers) as http:
        reply = http.post(f"{url}{path}", json={"model": "any", "stream": stream, "temperature": 1.0, **body})
    assert reply.status_code == 200, reply.text
    (turn,), (call,) = capture.turns(), capture.calls()
    prompt = engine.prompt_ids({"messages": [{"role": "user", "content": QUESTIONS[0]}]})
    assert list(call.completion.prompt_ids or ()) == prompt
    assert len(turn.completion_token_ids) == len(turn.per_token_logps) > 0
    again = engine.replay(prompt, turn.completion_token_ids)
    assert max(abs(one - other) for one, other in zip(turn.per_token_logps, again, strict=True)) < FLOAT_ERROR


@pytest.mark.parametrize(
    ("attack", "takes_effect"),
    [
        ({"n_predict": 60}, lambda reply: reply["usage"]["completion_tokens"] > 48),
        ({"grammar": 'root ::= "zebra"'}, lambda reply: reply["choices"][0]["message"]["content"] == "zebra"),
        ({"json_schema": {"const": "zebra"}}, lambda reply: reply["choices"][0]["message"]["content"] == '"zebra"'),
        ({"logit_bias": [["zebra", 1000.0]]}, lambda reply: "zebra" in reply["choices"][0]["message"]["content"]),
    ],
    ids=["n_predict", "grammar", "json_schema", "logit_bias"],
)
def test_what_takes_effect_at_the_engine_takes_none_through_the_proxy(
    engine: Any,
    open_capture: Callable[[str], tuple[str, Capture]],
    attack: dict[str, Any],
    takes_effect: Callable[[dict[str, Any]], bool],
) -> None:
    messages = [{"role": "user", "content": "Tell me a very long story about a lighthouse."}]
    body = {"messages": messages, "seed": 7, **attack}
    assert takes_effect(engine.post("/v1/chat/completions", {"max_tokens": 48, **body}))
    url, capture = open_capture(engine.url)
    headers = {"authorization": f"Bearer {capture.key}"}
    with httpx2.Client(timeout=120, trust_env=False, headers=headers) as http:
        reply = http.post(f"{url}/chat/completions", json=body).json()
    assert not takes_effect(reply)
    (call,) = capture.calls()
    assert set(call.removed) == set(attack)
    assert call.not_trainable == ()
