"""How calls are linked and exported: sequences, documents, JSONL, Parquet; records cut short."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import CaptureError
from openenv.rollout import Sampling
from openenv.rollout.capture import export, graph, read
from openenv.rollout.capture.records import Call

TOOLS = [{"type": "function", "function": {"name": "write"}}]


class Conversation:
    """Plays an agent whose prompts grow token by token, at an engine that samples the tokens that it names."""

    def __init__(self, agent: Any, engine: Any, fake: Any) -> None:
        self.agent, self.engine, self.fake = agent, engine, fake

    def ask(self, prompt: list[int], sampled: list[int], *, system: str = "s", tools: Any = TOOLS, **body: Any) -> None:
        """Make one call."""
        self.engine.respond = self.fake.vllm(sampled)
        messages = [{"role": "system", "content": system, "ids": prompt}]
        self.agent.chat_stream(messages=[*messages, {"role": "user", "content": "u", "ids": [0]}], tools=tools, **body)


@pytest.fixture
def talk(open_agent: Any, engine: Any, fake: Any) -> Conversation:
    """An agent's conversation."""
    return Conversation(open_agent(sampling=Sampling()), engine, fake)


def parents(calls: list[Call]) -> dict[int, int | None]:
    built = graph.build(calls)
    return {node.number: node.parent.number if node.parent else None for node in built.nodes}


def test_turns_that_continue_each_other_are_one_sequence(talk: Conversation) -> None:
    talk.ask([1, 2], [10, 11])  # its prompt ends with the 0 of the user's message
    talk.ask([1, 2, 0, 10, 11, 5], [12])
    talk.ask([1, 2, 0, 10, 11, 5, 0, 12, 6], [13, 14])
    capture = talk.agent.capture
    assert parents(capture.calls()) == {1: None, 2: 1, 3: 2}
    (sequence,) = capture.sequences()
    assert sequence.input_ids == [1, 2, 0, 10, 11, 5, 0, 12, 6, 0, 13, 14]
    assert sequence.loss_mask == [0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]
    assert [round(value, 3) for value in sequence.logprobs] == [
        0, 0, 0, -0.01, -0.011, 0, 0, -0.012, 0, 0, -0.013, -0.014,
    ]  # fmt: skip
    assert (sequence.role, sequence.node_ids, sequence.prompt_len) == ("agent", [1, 2, 3], 3)
    assert sequence.turn_lengths == [2, 1, 2]
    assert sequence.trainable


def test_discarded_answers_are_not_trained_on(talk: Conversation) -> None:
    talk.ask([1], [10])
    talk.ask([1], [11])
    talk.ask([1, 0, 11], [12])
    talk.ask([1, 0, 11], [13])  # the last word: the later answer is the one that counts
    sequences = talk.agent.capture.sequences()
    assert [(one.role, one.node_ids) for one in sequences] == [
        ("agent", [2, 4]),
        ("discarded", [1]),
        ("discarded", [2, 3]),
    ]
    assert [one.n_trainable for one in sequences] == [2, 1, 1]
    assert [one.trainable for one in sequences] == [True, False, False]


def test_sub_agents_and_titles_are_auxiliary_and_a_compaction_is_the_agents(talk: Conversation) -> None:
    talk.ask([7], [70], system="make a title", tools=None)
    talk.ask([1], [10])
    talk.ask([1, 0, 10], [11])
    talk.ask([8], [80], system="you are a sub-agent")
    talk.ask([1, 9], [12])  # the same agent, after its conversation was shortened
    sequences = talk.agent.capture.sequences()
    assert [(one.role, one.node_ids) for one in sequences] == [
        ("agent", [2, 3]),
        ("agent", [5]),
        ("auxiliary", [1]),
        ("auxiliary", [4]),
    ]
    document = export.document(talk.agent.capture.recording())
    assert document["stats"] == {
        "n_turns": 5, "n_roots": 4, "n_leaves": 4, "n_forks": 0, "n_discarded": 0,
        "n_sequences": 4, "n_trainable_sequences": 4, "n_trainable_tokens": 5,
    }  # fmt: skip
    assert [finding["code"] for finding in document["validation"]] == ["multiple_roots"]
    assert (document["trainable"], document["rollout_type"], document["capture_level"]) == (True, "train", "tokens")


def test_calls_that_the_model_has_run_do_not_take_the_agents_place(talk: Conversation) -> None:
    talk.ask([7], [70], system="make a title", tools=None)
    talk.ask([1], [10])
    for number in range(20, 25):  # more calls than the agent's own, and before it goes on
        talk.ask([number], [number + 100], system="say yes")
    talk.ask([20, 0, 120], [30], system="say yes")
    talk.ask([1, 0, 10], [11])
    sequences = talk.agent.capture.sequences()
    assert [one.node_ids for one in sequences if one.role == "agent"] == [[2, 9]]
    assert all(one.trainable for one in sequences)


def test_an_agent_without_tools_keeps_its_place_when_the_model_makes_calls_with_some(talk: Conversation) -> None:
    talk.ask([1], [10], tools=None)
    for number in (20, 21, 22):
        talk.ask([number], [number + 100])
    talk.ask([1, 0, 10], [11], tools=None)
    assert [one.node_ids for one in talk.agent.capture.sequences() if one.role == "agent"] == [[1, 5]]


def test_no_sampled_token_is_trained_on_twice(talk: Conversation) -> None:
    talk.ask([1], [10])
    talk.ask([1, 0, 10, 2], [11])
    talk.ask([1, 0, 10, 3], [12])
    talk.ask([1, 0, 10, 2, 0, 11], [13])
    talk.ask([1, 0, 10, 3, 0, 12], [14])
    sequences = talk.agent.capture.sequences()
    assert [one.node_ids for one in sequences] == [[1, 2, 4], [1, 3, 5]]
    assert [one.n_trainable for one in sequences] == [3, 2]


def test_a_prompt_with_other_ids_for_the_same_text_is_not_linked(talk: Conversation) -> None:
    talk.ask([1], [10, 11])
    talk.ask([1, 0, 1011], [12])
    document = export.document(talk.agent.capture.recording())
    codes = [finding["code"] for finding in document["validation"]]
    assert codes == ["multiple_roots", "per_turn_capture_only"]


class MessageTalk:
    """Makes calls with real messages at an engine whose prompt IDs are given for each call."""

    def __init__(self, agent: Any, engine: Any, fake: Any) -> None:
        self.agent, self.engine, self.fake = agent, engine, fake

    def ask(self, messages: list[Any], prompt: list[int], sampled: list[int], answer: dict[str, Any]) -> None:
        """Make one call; the answer is a message without its role."""
        entries = [{"token": str(token), "logprob": -0.1} for token in sampled]
        choice = {"index": 0, "message": {"role": "assistant", **answer}, "finish_reason": "stop"}
        choice |= {"token_ids": sampled, "logprobs": {"content": entries}}
        body = {"choices": [choice], "prompt_token_ids": prompt, "usage": {"completion_tokens": len(sampled)}}
        self.engine.respond = lambda request: self.fake.Answer.json(body)
        self.agent.chat(messages=messages, tools=TOOLS)


def call_of(arguments: str, number: int) -> dict[str, Any]:
    function = {"name": "write", "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}


def result_of(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": "done"}


@pytest.fixture
def chat(open_agent: Any, engine: Any, fake: Any) -> MessageTalk:
    return MessageTalk(open_agent(sampling=Sampling()), engine, fake)


def test_an_answer_with_other_tokens_in_the_next_prompt_is_a_sequence_and_not_discarded(chat: MessageTalk) -> None:
    messages: list[Any] = [{"role": "user", "content": "write"}]
    chat.ask(messages, [1], [10], call_of('{"a":1}', 1))
    messages += [{"role": "assistant", **call_of('{"a": 1}', 1)}, result_of(1)]
    chat.ask(messages, [1, 10, 2], [11], call_of('{"b":1}', 2))  # the first answer has the same tokens
    messages += [{"role": "assistant", **call_of('{"b": 1}', 2)}, result_of(2)]
    chat.ask(messages, [1, 10, 2, 1111, 2], [12], call_of('{"c":1}', 3))  # the second one does not
    messages += [{"role": "assistant", **call_of('{"c": 1}', 3)}, result_of(3)]
    chat.ask(messages, [1, 10, 2, 1111, 2, 1212, 2], [13], {"content": "finished"})  # nor does the third
    sequences = chat.agent.capture.sequences()
    assert [(one.role, one.node_ids, one.n_trainable) for one in sequences] == [
        ("agent", [1, 2], 2),
        ("agent", [1, 3], 1),
        ("agent", [1, 4], 1),
    ]
    counts = export.token_counts(chat.agent.capture.turns(), sequences)
    assert (counts.sampled, counts.trained, counts.excluded) == (4, 4, {})


def test_an_answer_that_the_agent_abandoned_stays_discarded(chat: MessageTalk) -> None:
    messages: list[Any] = [{"role": "user", "content": "write"}]
    chat.ask(messages, [1], [10], call_of('{"a":1}', 1))
    messages += [{"role": "assistant", **call_of('{"a": 1}', 1)}, result_of(1)]
    chat.ask(messages, [1, 10, 2], [11], call_of('{"b":1}', 2))
    hint = {"role": "user", "content": "not like that"}
    chat.ask([*messages, hint], [1, 10, 2, 3], [12], call_of('{"c":1}', 3))
    messages += [hint, {"role": "assistant", **call_of('{"c": 1}', 3)}, result_of(3)]
    chat.ask(messages, [1, 10, 2, 3, 1212, 2], [13], {"content": "finished"})
    sequences = chat.agent.capture.sequences()
    assert [(one.role, one.node_ids) for one in sequences] == [
        ("agent", [1, 3]),
        ("agent", [1, 4]),
        ("discarded", [1, 2]),
    ]
    counts = export.token_counts(chat.agent.capture.turns(), sequences)
    assert (counts.sampled, counts.trained, counts.excluded) == (4, 3, {"discarded": 1})


def test_an_answer_that_the_agent_shortened_is_trained_on(chat: MessageTalk) -> None:
    messages: list[Any] = [{"role": "user", "content": "write"}]
    chat.ask(messages, [1], [10], {"content": "one"})
    messages += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "on"}]
    chat.ask(messages, [1, 10, 2], [11], {"content": "<think>hm</think>two"})
    messages += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "on"}]
    chat.ask(messages, [1, 10, 2, 22, 2], [12], {"content": "three"})
    assert [(one.role, one.node_ids) for one in chat.agent.capture.sequences()] == [
        ("agent", [1, 2]),
        ("agent", [1, 3]),
    ]


def test_a_token_without_an_id_excludes_its_turn_only(chat: MessageTalk) -> None:
    def lose_a_token(request: Any) -> Any:
        entries = [{"token": "x", "logprob": -0.1, "id": 11}, {"token": "y", "logprob": -0.1}]
        choice = {"index": 0, "message": {"role": "assistant", "content": "two"}, "finish_reason": "stop"}
        body = {"choices": [{**choice, "logprobs": {"content": entries}}], "prompt_token_ids": [1, 10, 2]}
        return chat.fake.Answer.json({**body, "usage": {"completion_tokens": 2}})

    messages: list[Any] = [{"role": "user", "content": "write"}]
    chat.ask(messages, [1], [10], {"content": "one"})
    messages += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "on"}]
    chat.engine.respond = lose_a_token
    chat.agent.chat(messages=messages, tools=TOOLS)
    messages += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "on"}]
    chat.ask(messages, [1, 10, 2, 11, 99, 2], [12], {"content": "three"})
    document = export.document(chat.agent.capture.recording())
    (sequence,) = document["sequences"]
    assert (sequence["node_ids"], sequence["trainable"]) == ([1, 3], True)
    assert [token for token, bit in zip(sequence["input_ids"], sequence["loss_mask"], strict=True) if bit] == [10, 12]
    assert document["trainable"]
    assert document["tokens"] == {"sampled": 4, "trained": 2, "excluded": {"no_token_ids": 2}}


def test_a_turn_with_fewer_ids_than_the_engine_counted_is_excluded_alone(chat: MessageTalk) -> None:
    messages: list[Any] = [{"role": "user", "content": "write"}]
    chat.ask(messages, [1], [10], {"content": "one"})
    messages += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "on"}]
    chat.ask(messages, [1, 10, 2], [11, 12], {"content": "two"})
    recording = chat.agent.capture.recording()
    recording.calls[1].completion.usage["completion_tokens"] = 7  # type: ignore[index]
    (sequence,) = export.sequences(recording)
    assert (sequence.n_trainable, sequence.trainable, sequence.excluded) == (1, True, {"missing_tokens": 2})


def test_calls_without_ids_are_linked_by_their_messages(agent: Any, engine: Any, fake: Any) -> None:
    def respond(request: Any) -> Any:
        message = {"role": "assistant", "content": f"answer {len(request.body['messages'])}"}
        return fake.Answer.json({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    engine.respond = respond
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    second = [*first, {"role": "assistant", "content": [{"type": "text", "text": "answer 2"}]}]
    second.append({"role": "user", "content": "two"})
    agent.chat(messages=first)
    agent.chat(messages=second)
    agent.chat(messages=[{"role": "system", "content": "changed"}, *second[1:], {"role": "user", "content": "three"}])
    agent.chat(messages=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "another"}])
    recording = agent.capture.recording()
    assert parents(recording.calls) == {1: None, 2: 1, 3: 1, 4: None}
    document = export.document(recording)
    assert (document["capture_level"], document["trainable"], document["rollout_type"]) == ("text", False, "eval")
    assert agent.capture.sequences() == []
    (turn, *_) = agent.capture.turns()
    assert (turn.completion_tokens, turn.completion_token_ids, turn.per_token_logps) == ([], [], [])


def test_linking_many_turns_takes_no_longer_than_reading_them(talk: Conversation) -> None:
    from openenv.rollout.capture.dialects.dialect import Completion, Sampled

    calls, prompt = [], list(range(1000))
    for number in range(1, 401):
        sampled = Sampled((number, number), (-0.1, -0.1), ("a", "b"))
        done = Completion("stop", sampled, tuple(prompt))
        call = Call(number, "openai_chat", "openai_chat", "/", True, {}, {}, 0.0, answer={}, completion=done)
        calls.append(call)
        prompt += [number, number, *range(50)]
    built = graph.build(reversed(calls))  # whatever the order
    assert len(built.roots) == 1
    assert len(built.leaves) == 1


def test_missing_log_probabilities_make_tokens_untrainable_and_are_reported(
    open_agent: Any, engine: Any, fake: Any
) -> None:
    entries = {"content": [fake.entry(1), {**fake.entry(2), "logprob": None}]}
    chunk = fake.chat_chunk({"content": "ab"}, token_ids=[1, 2], logprobs=entries)
    end = fake.chat_chunk({}, finish="length")
    first = {**chunk, "prompt_token_ids": [9]}
    engine.respond = lambda request: fake.Answer.events(fake.event(first), fake.event(end), fake.DONE)
    agent = open_agent(sampling=Sampling(top_p=0.5))
    agent.chat_stream()
    (sequence,) = agent.capture.sequences()
    assert (sequence.input_ids, sequence.loss_mask) == ([9, 1, 2], [0, 1, 0])
    codes = [finding.code for finding in sequence.validation]
    assert codes == ["missing_logprobs", "truncated_turn", "truncated_sampling"]
    (turn,) = agent.capture.turns()
    assert turn.per_token_logps == [-0.001, None]


def test_failed_calls_are_turns_but_no_sequences(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = lambda request: fake.Answer.json({"error": {"message": "no"}}, 400)
    agent.chat()
    assert [turn.upstream_status for turn in agent.capture.turns()] == [400]
    document = export.document(agent.capture.recording())
    assert [finding["code"] for finding in document["validation"]] == ["no_turns"]


def test_a_torn_end_is_reported_and_all_before_it_is_read(talk: Conversation, tmp_path: Path) -> None:
    talk.ask([1], [10, 11, 12])
    talk.ask([1, 0, 10, 11, 12], [13])
    data = (talk.agent.capture.path / "calls.log").read_bytes()
    whole = read(talk.agent.capture.path)
    file = tmp_path / "cut.log"
    for size in range(len(data) - 1, len(data) // 3, -97):
        file.write_bytes(data[:size])
        cut = read(file)
        assert cut.rollout_id == whole.rollout_id
        for call, original in zip(cut.calls, whole.calls, strict=False):
            assert call.request == original.request
            sampled = call.completion.sampled
            assert sampled.ids == original.completion.sampled.ids[: len(sampled)]
    file.write_bytes(data[:-1])
    assert read(file).torn_bytes > 0
    codes = [finding["code"] for finding in export.document(read(file))["validation"]]
    assert "torn_records" in codes


def test_what_is_not_a_recording_is_not_read(tmp_path: Path) -> None:
    for data in (b"", b"hello\n", b'{"k":"call"}\n'):
        file = tmp_path / "x"
        file.write_bytes(data)
        with pytest.raises(CaptureError, match="does not hold records"):
            read(file)
    with pytest.raises(CaptureError, match="Cannot read"):
        read(tmp_path / "none")


def test_rollouts_are_written_as_jsonl_and_parquet(
    talk: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk.ask([1], [10])
    recording = talk.agent.capture.recording()
    assert export.write_jsonl(tmp_path / "all.jsonl", [recording, recording], include_messages=True) == 2
    (line, _) = (tmp_path / "all.jsonl").read_text().splitlines()
    assert json.loads(line)["sequences"][0]["input_ids"] == [1, 0, 10]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        export.write_parquet(tmp_path / "all.parquet", [recording])
    monkeypatch.undo()
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional dependency")
    assert export.write_parquet(tmp_path / "all.parquet", [recording]) == 1
    (row,) = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert (row["input_ids"], row["loss_mask"], row["role"]) == ([1, 0, 10], [0, 0, 1], "agent")
    assert (row["reward"], row["status"]) == (None, None)  # known to a store, not to the proxy


def test_a_call_under_way_is_read_as_far_as_it_got(
    agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    engine.respond = fake.vllm(list(range(1, 100)), delay_s=0.02)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with agent.client.stream("POST", "/chat/completions", json=body, headers=agent.headers):
        wait_for(lambda: bool(agent.capture.calls()) and len(agent.capture.calls()[0].completion.sampled) > 2)
        (call,) = agent.capture.calls()
        assert call.ended is None
        assert agent.capture.stats().active == 1
