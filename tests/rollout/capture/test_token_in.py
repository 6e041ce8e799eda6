"""Token-in, token-out against a double of vLLM whose template writes answers in other tokens than the policy."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from openenv.rollout.capture import Capture, CaptureServer, export
from openenv.rollout.tasks.task import Model, Sampling
from vllm_double import END, SglangDouble, VllmDouble, experts, logprob

Json = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def policy(prompt: str) -> str:
    """Call a tool with compact JSON until three results are there; think before each call."""
    number = prompt.count("<tool_response>")
    if number >= 3:
        return "The result is there."
    arguments = json.dumps({"x": number, "y": 'an "end"'}, separators=(",", ":"))
    call = f'<tool_call>\n{{"name":"add","arguments":{arguments}}}\n</tool_call>'
    return f"<think>\nthe next is {number}\n</think>\n\n{call}"


@pytest.fixture
def double() -> Iterator[VllmDouble]:
    with VllmDouble(policy) as running:
        yield running


class Agent:
    """Calls a proxy's model, and carries its tool calls out."""

    def __init__(self, server: CaptureServer, double: VllmDouble, **fields: Any) -> None:
        model = {"base_url": double.url, "name": "m", "engine": "vllm", "sampling": Sampling(), **fields}
        self.capture: Capture = server.open("r1", Model(**model))
        self.messages: list[Json] = [{"role": "user", "content": "Add them."}]
        self._url = f"{server.url}/v1/chat/completions"

    def ask(self, *, stream: bool = False, **fields: Any) -> Json:
        body = {
            "model": "any",
            "messages": self.messages,
            "tools": TOOLS,
            "max_tokens": 400,
            "stream": stream,
            **fields,
        }
        with httpx2.Client(trust_env=False, timeout=30) as http:
            reply = http.post(self._url, json=body, headers={"authorization": f"Bearer {self.capture.key}"})
        assert reply.status_code == 200, reply.text
        if not stream:
            message: Json = reply.json()["choices"][0]["message"]
            return message
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        merged: Json = {"role": "assistant", "content": None}
        for chunk in chunks:
            for choice in chunk["choices"]:
                merged |= {name: value for name, value in choice["delta"].items() if value}
        return merged

    def turn(self, **fields: Any) -> Json:
        """Ask, and add the answer and the results of its calls to the conversation."""
        message = self.ask(**fields)
        self.messages.append({name: message[name] for name in ("role", "content", "tool_calls") if name in message})
        for call in message.get("tool_calls") or ():
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"done: {call['id']}"})
        return message


def check(capture: Capture, double: VllmDouble) -> None:
    """Compare the records with what the engine really sampled."""
    samples = [sample for sample in double.samples if sample.path in ("chat", "completions")]
    for call, sample in zip(capture.calls(), samples, strict=True):
        assert list(call.completion.prompt_ids or ()) == sample.prompt
        assert list(call.completion.sampled.ids) == sample.ids
        assert list(call.completion.sampled.logprobs) == pytest.approx(sample.logprobs)
    for sequence in capture.sequences():
        ids = sequence.input_ids
        for place, bit in enumerate(sequence.loss_mask):
            if bit:
                assert sequence.logprobs[place] == pytest.approx(logprob(ids[:place], ids[place], 0))


def test_without_token_in_each_answer_is_a_sequence_and_none_is_discarded(
    server: CaptureServer, double: VllmDouble
) -> None:
    agent = Agent(server, double, token_in=False)
    for _ in range(4):
        agent.turn()
    sequences = agent.capture.sequences()
    assert [(one.role, one.n_turns, one.trainable) for one in sequences] == [("agent", 1, True)] * 4
    check(agent.capture, double)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_one_sequence(server: CaptureServer, double: VllmDouble, stream: bool) -> None:
    agent = Agent(server, double)
    answers = [agent.turn(stream=stream) for _ in range(4)]
    assert [len(answer.get("tool_calls") or ()) for answer in answers] == [1, 1, 1, 0]
    assert json.loads(answers[2]["tool_calls"][0]["function"]["arguments"]) == {"x": 2, "y": 'an "end"'}
    assert answers[1]["reasoning"] == "the next is 1"
    assert answers[3]["content"] == "The result is there."
    assert [sample.path for sample in double.samples] == ["chat", *["completions"] * 3]
    (sequence,) = agent.capture.sequences()
    assert (sequence.n_turns, sequence.trainable) == (4, True)
    assert sequence.n_trainable == sum(len(sample.ids) for sample in double.samples)
    calls = agent.capture.calls()
    before = [len(sample.prompt) + len(sample.ids) for sample in double.samples]
    assert [call.reused_ids for call in calls] == [0, *before[:-1]]
    check(agent.capture, double)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_sglang_is_one_sequence(server: CaptureServer, stream: bool) -> None:
    with SglangDouble(policy, routed_experts=True, version=7, label="7") as double:
        agent = Agent(server, double, engine="sglang", routed_experts=True, agent_may_set=("seed",))
        answers = [agent.turn(stream=stream, seed=3) for _ in range(4)]
    assert [len(answer.get("tool_calls") or ()) for answer in answers] == [1, 1, 1, 0]
    assert answers[1]["reasoning_content"] == "the next is 1"
    # SGLang renders by chat requests for one token, which are no calls of the agent.
    sampled = [sample for sample in double.samples if sample.finish == "stop"]
    assert [sample.path for sample in sampled] == ["chat", *["generate"] * 3]
    (sequence,) = agent.capture.sequences()
    assert (sequence.n_turns, sequence.policy_versions) == (4, ["7"] * 4)
    assert sequence.routed_experts is not None
    expected = experts(sequence.input_ids, 7)
    assert [sequence.routed_experts.of(place) for place in range(len(expected))] == expected.reshape(
        len(expected), -1
    ).tolist()
    for call, sample in zip(agent.capture.calls(), sampled, strict=True):
        assert list(call.completion.prompt_ids or ()) == sample.prompt
        assert list(call.completion.sampled.ids) == sample.ids
        assert list(call.completion.sampled.logprobs) == pytest.approx(sample.logprobs)


def test_an_answer_cut_by_the_limit_gets_the_end_that_the_template_writes(
    server: CaptureServer, double: VllmDouble
) -> None:
    double.policy = lambda prompt: "the answer and the end of the thing, in another tone"
    agent = Agent(server, double)
    for limit in (400, 12, 400):
        message = agent.ask(max_tokens=limit, tools=None)
        agent.messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "And?"}]
    (sequence,) = agent.capture.sequences()
    first, second, third = double.samples
    assert second.finish == "length"
    assert third.prompt[: len(second.prompt) + 12] == [*second.prompt, *second.ids]
    assert third.prompt[len(second.prompt) + 12] == END
    assert sequence.loss_mask[len(second.prompt) + 12] == 0
    assert first.path == "chat"
    check(agent.capture, double)


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: messages[1].update(content="I changed it."),
        lambda messages: messages[0].update(content="Add others."),
        lambda messages: messages[1]["tool_calls"][0]["function"].update(arguments='{"x": 7}'),
    ],
)
def test_a_conversation_with_another_past_is_a_new_sequence(
    server: CaptureServer, double: VllmDouble, change: Any
) -> None:
    agent = Agent(server, double)
    agent.turn()
    change(agent.messages)
    agent.turn()
    assert [sample.path for sample in double.samples] == ["chat", "chat"]
    assert [call.reused_ids for call in agent.capture.calls()] == [0, 0]
    check(agent.capture, double)


def test_arguments_with_other_spaces_are_the_same_answer(server: CaptureServer, double: VllmDouble) -> None:
    agent = Agent(server, double)
    agent.turn()
    function = agent.messages[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=4, sort_keys=True)
    agent.turn()
    assert [sample.path for sample in double.samples] == ["chat", "completions"]
    (sequence,) = agent.capture.sequences()
    assert sequence.n_turns == 2


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>\n<|im_start|>assistant\nb", "<tool_call>{}</tool_call>"])
def test_markup_in_tool_results_does_not_move_the_end_of_an_answer(
    server: CaptureServer, double: VllmDouble, text: str
) -> None:
    agent = Agent(server, double)
    agent.turn()
    agent.messages[-1]["content"] = text
    agent.turn()
    first, second = double.samples
    assert second.prompt[: len(first.prompt) + len(first.ids)] == [*first.prompt, *first.ids]
    assert agent.capture.sequences()[0].n_turns == 2
    check(agent.capture, double)


def test_a_branch_and_a_retry_are_continued_from_their_own_answers(server: CaptureServer, double: VllmDouble) -> None:
    agent = Agent(server, double)
    agent.turn()
    first = list(agent.messages)
    agent.turn()
    agent.messages = [*first[:-1], {**first[-1], "content": "another result"}]
    agent.turn()
    one, two, three = double.samples
    known = [*one.prompt, *one.ids]
    assert two.prompt[: len(known)] == three.prompt[: len(known)] == known
    assert two.prompt != three.prompt
    check(agent.capture, double)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"temperature": 1.0, "stop": ["x"]}},
        {"sampling": {"temperature": 1.0, "logit_bias": {"1": 1}}},
        {"engine": None},
        {"max_tokens_cap": None},
    ],
)
def test_requests_without_a_form_on_the_token_route_are_sent_as_messages(
    server: CaptureServer, double: VllmDouble, fields: Json
) -> None:
    agent = Agent(server, double, **fields)
    for _ in range(2):
        agent.turn(**({"max_tokens": None} if "max_tokens_cap" in fields else {}))
    assert {sample.path for sample in double.samples} == {"chat"}
    assert all(one.role == "agent" for one in agent.capture.sequences())


def test_an_engine_without_the_routes_is_asked_once(server: CaptureServer) -> None:
    with VllmDouble(policy, token_routes=False) as double:
        agent = Agent(server, double)
        for _ in range(3):
            agent.turn()
        assert {sample.path for sample in double.samples} == {"chat"}
        memory = agent.capture.rollout.tokens
        assert memory is not None
        assert memory.is_off


def test_tool_calls_that_only_the_engine_can_read_stay_on_the_chat_route(
    server: CaptureServer, double: VllmDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_double

    def other(text: str, *, wants_tools: bool) -> Json:
        function = {"name": "add", "arguments": '{"read": "by another parser"}'}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    monkeypatch.setattr(vllm_double, "parsed", other)
    agent = Agent(server, double)
    for _ in range(3):
        agent.turn()
    assert {sample.path for sample in double.samples} == {"chat"}


def test_a_refusal_of_the_token_route_is_asked_again_as_messages(server: CaptureServer, double: VllmDouble) -> None:
    agent = Agent(server, double)
    agent.turn()
    # With the thoughts the conversation is too long, and without them it is not.
    double.max_model_len = len(double.samples[0].prompt) + len(double.samples[0].ids) + 400
    agent.turn(max_tokens=360)
    assert [sample.path for sample in double.samples] == ["chat", "chat"]
    (_, second) = agent.capture.calls()
    assert (second.ended, second.reused_ids, double.refused) == ("complete", 0, 1)


def test_records_are_read_again_from_disk(server: CaptureServer, double: VllmDouble, tmp_path: Path) -> None:
    agent = Agent(server, double)
    for _ in range(3):
        agent.turn()
    before = agent.capture.sequences()
    agent.capture.close()
    assert agent.capture.sequences() == before
    assert agent.capture.calls()[1].sent["messages"][1]["role"] == "assistant"


@pytest.mark.parametrize("seed", range(3))
def test_random_agents_are_captured_exactly(server: CaptureServer, double: VllmDouble, seed: int) -> None:
    draw = random.Random(seed)
    double.drift = draw.choice([0.0, 0.3, 1.0])
    double.policy = lambda prompt: policy(prompt) if draw.random() < 0.7 else f"{draw.random()} <|im_end|> and more"
    agent = Agent(server, double)
    for _ in range(12):
        messages = agent.messages
        change = draw.choice(["go on", "go on", "go on", "retry", "edit", "cut", "spaces", "user"])
        if change == "retry" and messages[-1]["role"] == "tool":
            agent.ask(stream=draw.random() < 0.5)
        elif change == "edit":
            draw.choice(messages)["content"] = f"another text {draw.random()}"
        elif change == "cut" and len(messages) > 2:
            del messages[draw.randrange(1, len(messages)) :]
        elif change == "spaces":
            for message in messages:
                if message["role"] == "assistant" and isinstance(message["content"], str):
                    message["content"] += " \n"
        if messages[-1]["role"] == "assistant" or change == "user":
            messages.append({"role": "user", "content": f"Go on {draw.random()}<|im_end|>\n<|im_start|>"})
        limit = draw.choice([400, 400, 9])
        agent.turn(stream=draw.random() < 0.5, max_tokens=limit)
    check(agent.capture, double)
    sequences = agent.capture.sequences()
    counts = export.token_counts(agent.capture.turns(), sequences)
    assert counts.sampled == sum(len(sample.ids) for sample in double.samples)
    assert counts.trained == sum(one.n_trainable for one in sequences if one.trainable)
    assert counts.sampled == counts.trained + sum(counts.excluded.values())
    assert set(counts.excluded) <= {"discarded"}
