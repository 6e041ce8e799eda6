"""Budgets hold: against engines that count nothing or falsely, calls at the same time, and answers that are cut off."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from openenv.rollout.capture import CaptureServer
from openenv.rollout.capture.captured_rollout import EXHAUSTED
from openenv.rollout.capture.stream_tap import plausible_tokens
from openenv.rollout.tasks.task import Budget

STOPPED = {"role": "assistant", "content": EXHAUSTED}


def stream_of(fake: Any, texts: list[str], *, usage: int | None = None, delay_s: float = 0.0) -> Any:
    """A stream that names neither ids nor log-probabilities."""
    pieces: list[Any] = []
    for text in texts:
        pieces += [fake.event(fake.chat_chunk({"content": text})), delay_s]
    pieces.append(fake.event(fake.chat_chunk({}, finish="stop")))
    if usage is not None:
        pieces.append(fake.event({**fake.chat_chunk({}), "choices": [], "usage": {"completion_tokens": usage}}))
    return fake.Answer.events(*pieces, fake.DONE)


@pytest.mark.parametrize(
    ("named", "text_bytes", "events", "expected"),
    [
        (10, 45, 10, 10),  # the engine says it
        (0, 600, 90, 90),  # it says nothing: a token is an event, or four bytes
        (0, 400, 1, 100),
        (1, 600, 90, 90),
        (1, 4000, 1, 1000),  # it says too little
        (3, 0, 0, 3),  # thoughts that are not shown
        (0, 0, 0, 0),
        (5, 2, 1, 5),
    ],
)
def test_tokens_are_what_the_engine_says_where_that_can_be(
    named: int, text_bytes: int, events: int, expected: int
) -> None:
    assert plausible_tokens(named, text_bytes, events=events) == expected


@pytest.mark.parametrize("usage", [None, 0, 1])
@pytest.mark.parametrize("stream", [True, False])
def test_answers_without_a_true_usage_are_counted_by_what_came(
    open_agent: Callable[..., Any], engine: Any, fake: Any, usage: int | None, stream: bool
) -> None:
    agent = open_agent(budget=Budget(max_completion_tokens=90))
    texts = ["word "] * 100

    def respond(request: Any) -> Any:
        if stream:
            return stream_of(fake, texts[: request.body["max_tokens"]], usage=usage)
        message = {"role": "assistant", "content": "".join(texts)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return fake.Answer.json({"choices": [choice], "usage": {"completion_tokens": usage or 0}})

    engine.respond = respond
    agent.chat(stream=stream)
    assert agent.capture.stats().completion_tokens >= 90
    second = agent.chat()
    assert second.json()["choices"][0]["message"] == STOPPED
    assert len(engine.requests) == 1


@pytest.mark.parametrize("path", ["/responses", "/messages"])
def test_text_of_other_dialects_is_counted_too(open_agent: Any, engine: Any, fake: Any, path: str) -> None:
    dialect = "anthropic" if path == "/messages" else "openai_responses"
    agent = open_agent(dialect=dialect)
    text = "word " * 80
    if dialect == "anthropic":
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {"role": "assistant", "content": []}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": text}},
            {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": text}},
            {"type": "message_stop"},
        ]
    else:
        events = [
            {"type": "response.output_text.delta", "output_index": 0, "delta": text},
            {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": text},
            {"type": "response.completed", "response": {"status": "completed", "output": []}},
        ]
    engine.respond = lambda request: fake.Answer.events(
        *(fake.event(event) for event in events[:-1]), fake.event(events[-1])
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 99, "stream": True}
    agent.post(path, body)
    assert agent.capture.stats().completion_tokens == 200


def test_an_endless_stream_is_cut_off_at_the_budget(open_agent: Any, engine: Any, fake: Any, wait_for: Any) -> None:
    agent = open_agent(budget=Budget(max_completion_tokens=20))
    engine.respond = lambda request: stream_of(fake, ["word "] * 5000, delay_s=0.001)
    with pytest.raises(httpx2.RemoteProtocolError):
        agent.chat(stream=True)
    wait_for(lambda: engine.hung_up == [1])
    (call,) = agent.capture.calls()
    stats = agent.capture.stats()
    assert (call.ended, stats.budget_stops, stats.failures_in_a_row) == ("budget", 1, 0)
    assert 20 < stats.completion_tokens < 5000
    assert agent.chat().json()["choices"][0]["message"] == STOPPED


def test_calls_at_the_same_time_stay_within_the_tokens_together(open_agent: Any, engine: Any, fake: Any) -> None:
    agent = open_agent(max_tokens_cap=40, budget=Budget(max_completion_tokens=100))
    engine.respond = lambda request: fake.vllm(list(range(request.body["max_tokens"])), delay_s=0.005)(request)
    replies: list[Any] = []
    threads = [threading.Thread(target=lambda: replies.append(agent.chat_stream())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(replies) == 8
    stats = agent.capture.stats()
    assert (stats.completion_tokens, stats.budget_exhausted) == (100, "completion_tokens")
    assert sorted(request.body["max_tokens"] for request in engine.requests) == [20, 40, 40]
    assert stats.budget_stops == 5


def test_a_call_that_waits_for_tokens_begins_when_another_leaves_some(open_agent: Any, engine: Any, fake: Any) -> None:
    agent = open_agent(max_tokens_cap=None, budget=Budget(max_completion_tokens=100))
    engine.respond = lambda request: fake.vllm([1, 2], delay_s=0.1)(request)
    replies: list[Any] = []
    threads = [threading.Thread(target=lambda: replies.append(agent.chat())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [reply.status_code for reply in replies] == [200, 200]
    assert sorted(request.body["max_tokens"] for request in engine.requests) == [98, 100]


def test_a_waiting_call_ends_with_its_agent_or_its_key(
    server: CaptureServer, open_agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    agent = open_agent(max_tokens_cap=None, budget=Budget(max_completion_tokens=100))
    engine.respond = lambda request: fake.vllm([1], delay_s=30)(request)
    rollout = server.find(agent.capture.rollout_id)
    assert rollout is not None
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(agent.chat().status_code)
        except httpx2.HTTPError as exc:
            outcome.append(type(exc))

    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with agent.client.stream("POST", "/chat/completions", json=body, headers=agent.headers):
        with pytest.raises(httpx2.ReadTimeout):
            agent.client.post("/chat/completions", json=body, headers=agent.headers, timeout=0.2)
        wait_for(lambda: rollout.waiting == 0)
        thread = threading.Thread(target=call)
        thread.start()
        wait_for(lambda: rollout.waiting == 1)
        agent.capture.revoke()
        thread.join(10)
    assert outcome == [401]
    assert len(engine.requests) == 1


def test_a_whole_answer_that_the_agent_does_not_wait_for_counts_as_long_as_it_may_be(
    open_agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    agent = open_agent(budget=Budget(max_completion_tokens=100))
    engine.respond = lambda request: fake.Answer([20.0, b"{}"], 200, {"content-type": "application/json"})
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
    for expected in (60, 40):
        with pytest.raises(httpx2.ReadTimeout):
            agent.client.post("/chat/completions", json=body, headers=agent.headers, timeout=0.3)
        wait_for(lambda: agent.capture.stats().active == 0)
        assert engine.requests[-1].body["max_tokens"] == expected
    stats = agent.capture.stats()
    assert (stats.completion_tokens, stats.budget_exhausted) == (0, "completion_tokens")
    assert agent.chat().json()["choices"][0]["message"] == STOPPED


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_ends_when_the_time_of_the_budget_does(
    open_agent: Any, engine: Any, fake: Any, stream: bool, wait_for: Callable[..., None]
) -> None:
    agent = open_agent(budget=Budget(max_seconds=2.0))
    if stream:
        engine.respond = lambda request: stream_of(fake, ["word "] * 3000, delay_s=0.01)
        with pytest.raises(httpx2.RemoteProtocolError):
            agent.chat(stream=True)
    else:
        engine.respond = lambda request: fake.Answer([30.0, b"{}"], 200, {"content-type": "application/json"})
        assert agent.chat().json()["choices"][0]["message"] == STOPPED
    (call,) = agent.capture.calls()
    stats = agent.capture.stats()
    assert (call.ended, stats.budget_exhausted, stats.budget_stops) == ("budget", "seconds", 1)
    assert stats.failures_in_a_row == 0
    assert agent.capture.recording().stops[0]["limit"] == "seconds"


def test_records_do_not_grow_without_end(agent: Any, engine: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.rollout.capture.records.MAX_RECORDS", 60_000)
    statuses = []
    for number in range(12):  # the same words in another order: what grows is the ids of the prompt
        ids = [number, *range(1000, 3000)]
        statuses.append(agent.chat(messages=[{"role": "user", "content": f"{number}", "ids": ids}]).status_code)
    assert statuses[0] == 200
    assert statuses[-1] == 413
    assert (agent.capture.path / "calls.log").stat().st_size < 90_000
    assert agent.capture.stats().calls == statuses.count(200)
    assert "bytes" in agent.chat().json()["error"]["message"]


@pytest.mark.parametrize(("items", "calls"), [(1, 20), (1000, 12)])
def test_small_calls_count_with_the_memory_that_they_take(
    agent: Any, engine: Any, fake: Any, monkeypatch: pytest.MonkeyPatch, items: int, calls: int
) -> None:
    monkeypatch.setattr("openenv.rollout.capture.records.MAX_RECORDS", calls * (12_000 + 8 * items) + 500 * items)
    messages = [{"role": "user", "content": f"{number}"} for number in range(items)]
    statuses = [agent.chat(messages=messages).status_code for _ in range(calls + 5)]
    assert statuses == sorted(statuses)
    assert calls / 2 < statuses.count(200) < calls + 3
    assert statuses[-1] == 413


def test_answers_of_the_budget_are_listed_only_so_often(
    open_agent: Any, engine: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.rollout.capture.captured_rollout.MAX_STOPS", 3)
    agent = open_agent(budget=Budget(max_calls=0))
    for _ in range(5):
        agent.chat()
    assert agent.capture.stats().budget_stops == 5
    assert len(agent.capture.recording().stops) == 3


# Requests that would hold up the proxy, which all rollouts share


HOSTILE: list[tuple[bytes, int, str]] = [
    (b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}", 400, "nested"),
    (b'{"messages":' + b"[" * 500_000 + b"]" * 500_000 + b"}", 400, "nested"),
    (b'{"messages":[' + b"{}," * 60_000 + b"{}]}", 413, "items"),
    (b'{"tools":[' + b"1," * 60_000 + b"1]}", 413, "items"),
    (b'{"x":[' + b"1," * 2_100_000 + b"1]}", 413, "values"),
    (b'{"max_tokens":' + b"9" * 5000 + b"}", 400, "JSON"),
    (b"\xff\xfe{}", 400, "JSON"),
    (b"", 400, "JSON"),
    (b"null", 400, "object"),
]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages/count_tokens"])
def test_hostile_requests_are_refused_with_a_reason(agent: Any, engine: Any, path: str) -> None:
    for body, status, message in HOSTILE:
        response = agent.client.post(path, content=body, headers=agent.headers)
        assert response.status_code == status, message
        error = response.json()["error"]
        assert error["type"] in ("invalid_request_error", "request_too_large")
        assert message in error["message"]
    assert engine.requests == []
    assert agent.capture.stats().calls == 0
    assert agent.chat().status_code == 200


def test_a_request_of_odd_texts_is_recorded_as_it_is(agent: Any, engine: Any) -> None:
    deep: Any = "\ud800"
    for _ in range(150):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": "hi \ud800", "deep": deep}]}
    response = agent.client.post("/chat/completions", content=json.dumps(body).encode(), headers=agent.headers)
    assert response.status_code == 200
    assert agent.capture.calls()[0].request["messages"] == body["messages"]
    assert engine.requests[0].body["messages"] == body["messages"]


def test_many_unknown_names_do_not_fill_the_record(agent: Any) -> None:
    assert agent.chat(**{f"{number:09}" * 20: 1 for number in range(2000)}).status_code == 200
    (call,) = agent.capture.calls()
    assert len(call.removed) == 200
    assert max(map(len, call.removed)) == 80
