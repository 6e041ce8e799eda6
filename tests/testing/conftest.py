"""Fixtures for tests of scripted models: models behind real ports, and calls to them in each dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn

Json = dict[str, Any]

WORK = Script(
    name="work",
    turns=(
        Turn(
            text="I will write it.",
            calls=(ScriptedCall(name="write", arguments={"path": "ü.py", "body": "x = 'ü'\n"}),),
        ),
        Turn(calls=(ScriptedCall(name="run", arguments={"b": 2, "a": [1, {"c": None}]}), ScriptedCall(name="look"))),
        Turn(text="All done — bye."),
    ),
)


@dataclass
class Reply:
    """One answer, read back from a dialect's wire format."""

    text: str
    calls: list[tuple[str, str, Any]]
    finish: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    events: list[Json] = field(default_factory=list)


class Speaker:
    """Speaks one dialect, as an agent does: keeps the conversation, sends back what it parsed, in another spelling."""

    def __init__(self, http: httpx2.Client, model: ScriptedModel, dialect: str, stream: bool, name: str | None) -> None:
        self._http, self._url, self._name = http, model.url, name or model.name
        self.dialect, self._stream = dialect, stream
        self.history: list[Json] = []
        self.tools = [{"name": "write"}, {"name": "run"}, {"name": "look"}]

    def say(self, text: str) -> None:
        """Add what a user says."""
        self.history.append({"role": "user", "content": text})

    def ask(self, **more: Any) -> Reply:
        """Ask for the next answer and keep it."""
        reply = self.try_ask(**more)
        self.keep(reply)
        return reply

    def try_ask(self, **more: Any) -> Reply:
        """Ask for the next answer, and forget it."""
        body = {"model": self._name, "stream": self._stream, "return_token_ids": True, **self._body(), **more}
        path = {"openai_chat": "chat/completions", "openai_responses": "responses", "anthropic": "messages"}
        url = f"{self._url}/{path[self.dialect]}"
        read = getattr(self, f"_read_{self.dialect}")
        if not self._stream:
            response = self._http.post(url, json=body)
            response.raise_for_status()
            return read(response.json(), [])
        with self._http.stream("POST", url, json=body) as response:
            response.raise_for_status()
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        return read(None, events)

    def results(self, reply: Reply, text: str = "ok") -> None:
        """Add a result for each call of an answer."""
        for call_id, _, _ in reply.calls:
            if self.dialect == "openai_chat":
                self.history.append({"role": "tool", "tool_call_id": call_id, "content": text})
            elif self.dialect == "openai_responses":
                self.history.append({"type": "function_call_output", "call_id": call_id, "output": text})
            else:
                block = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": text}]}
                self.history.append({"role": "user", "content": [block]})

    def keep(self, reply: Reply) -> None:
        """Add an answer, its arguments with spaces and in another order, as clients write them."""

        def spelled(arguments: Any) -> str:
            return json.dumps(dict(reversed(arguments.items())), indent=1)

        if self.dialect == "openai_chat":
            calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": spelled(arguments)}}
                for call_id, name, arguments in reply.calls
            ]
            self.history.append(
                {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}
            )
        elif self.dialect == "openai_responses":
            if reply.text:
                content = [{"type": "output_text", "text": reply.text}]
                self.history.append({"type": "message", "role": "assistant", "content": content})
            for call_id, name, arguments in reply.calls:
                self.history.append(
                    {"type": "function_call", "call_id": call_id, "name": name, "arguments": spelled(arguments)}
                )
        else:
            blocks: list[Json] = [{"type": "text", "text": reply.text}] if reply.text else []
            blocks += [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in reply.calls]
            self.history.append({"role": "assistant", "content": blocks})

    def _body(self) -> Json:
        tools: list[Json] = self.tools
        if self.dialect == "openai_chat":
            tools = [{"type": "function", "function": tool} for tool in self.tools]
            return {"messages": self.history, "tools": tools, "logprobs": True, "top_logprobs": 3}
        if self.dialect == "openai_responses":
            return {"input": self.history, "tools": [{"type": "function", **tool} for tool in tools]}
        return {"messages": self.history, "tools": tools, "max_tokens": 4000}

    def _read_openai_chat(self, whole: Json | None, events: list[Json]) -> Reply:
        if whole is not None:
            choice = whole["choices"][0]
            message = choice["message"]
            calls = [
                (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", [])
            ]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            text, finish = message["content"] or "", choice["finish_reason"]
            return Reply(text, calls, finish, _prompt(whole), choice["token_ids"], logprobs, [whole])
        text, finish, token_ids, logprobs = "", "", [], []
        opened: dict[int, list[str]] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            token_ids += choice.get("token_ids", [])
            logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content", [])]
            for call in choice["delta"].get("tool_calls", []):
                parts = opened.setdefault(call["index"], ["", "", ""])
                parts[0] = call.get("id", parts[0])
                parts[1] += call["function"].get("name", "")
                parts[2] += call["function"]["arguments"]
        calls = [(call_id, name, json.loads(arguments)) for call_id, name, arguments in opened.values()]
        return Reply(text, calls, finish, _prompt(events[0]), token_ids, logprobs, events)

    def _read_openai_responses(self, whole: Json | None, events: list[Json]) -> Reply:
        assembled = whole or events[-1]["response"]
        texts = [part["text"] for item in assembled["output"] for part in item.get("content", ())]
        calls = [
            (item["call_id"], item["name"], json.loads(item["arguments"]))
            for item in assembled["output"]
            if item["type"] == "function_call"
        ]
        finish = "length" if assembled["status"] == "incomplete" else "tool_calls" if calls else "stop"
        if whole is not None:
            logprobs = [entry["logprob"] for entry in whole["logprobs"]]
            return Reply(
                "".join(texts), calls, finish, whole["prompt_token_ids"], whole["token_ids"], logprobs, [whole]
            )
        prompt = events[0]["response"]["prompt_token_ids"]
        ids, logprobs = _carried(events)
        streamed = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert streamed == "".join(texts)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return Reply(streamed, calls, finish, prompt, ids, logprobs, events)

    def _read_anthropic(self, whole: Json | None, events: list[Json]) -> Reply:
        finishes = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
        if whole is not None:
            text = "".join(block["text"] for block in whole["content"] if block["type"] == "text")
            calls = [(b["id"], b["name"], b["input"]) for b in whole["content"] if b["type"] == "tool_use"]
            logprobs = [entry["logprob"] for entry in whole["logprobs"]]
            finish = finishes[whole["stop_reason"]]
            return Reply(text, calls, finish, whole["prompt_token_ids"], whole["token_ids"], logprobs, [whole])
        blocks: list[Json] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                blocks[event["index"]]["text"] += event["delta"]["text"]
            elif event["type"] == "content_block_delta":
                blocks[event["index"]]["json"] += event["delta"]["partial_json"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [(b["id"], b["name"], json.loads(b["json"] or "{}")) for b in blocks if b["type"] == "tool_use"]
        ids, logprobs = _carried(events)
        finish = next(finishes[e["delta"]["stop_reason"]] for e in events if e["type"] == "message_delta")
        return Reply(text, calls, finish, events[0]["message"]["prompt_token_ids"], ids, logprobs, events)


def _prompt(event: Json) -> list[int]:
    return event.get("prompt_token_ids") or event["choices"][0].get("prompt_token_ids") or []


def _carried(events: list[Json]) -> tuple[list[int], list[float]]:
    ids = [token for event in events for token in event.get("token_ids", [])]
    return ids, [entry["logprob"] for event in events if "token_ids" in event for entry in event["logprobs"]]


Speak = Callable[..., Speaker]


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    """A client that waits long enough for a busy machine."""
    with httpx2.Client(timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedModel]]:
    """Start scripted models; all are stopped when the test ends."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(ScriptedModel(*(args or (WORK,)), **options))


@pytest.fixture
def speak(http: httpx2.Client) -> Speak:
    """Speak to a scripted model."""

    def begin(
        model: ScriptedModel, dialect: str = "openai_chat", *, stream: bool = True, name: str | None = None
    ) -> Speaker:
        return Speaker(http, model, dialect, stream, name)

    return begin
