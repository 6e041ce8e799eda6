"""Anthropic messages, from endpoints that speak them themselves. They have neither ids nor log-probabilities."""

from __future__ import annotations

import json
import uuid
from typing import Any

from ...task import Dialect
from ..encoding import Json, dumps, event_bytes
from .dialect import (
    CallOptions,
    Completion,
    RewrittenRequest,
    as_dict,
    as_list,
    capped,
    count_in,
    dicts_in,
    error_kind,
    estimated_tokens,
)

NAME: Dialect = "anthropic"
PATH = "/messages"
COUNT_PATH = "/messages/count_tokens"


def rewrite(body: Json, options: CallOptions) -> RewrittenRequest:
    """Return the request as the endpoint gets it; nothing is forced that the agent would see."""
    sent = dict(body)
    sent["model"] = options.model
    if options.max_tokens is not None:
        sent["max_tokens"] = capped(sent.get("max_tokens"), options.max_tokens)
    if options.disable_thinking:
        sent.pop("thinking", None)
    return RewrittenRequest(sent)


def strip_event(chunk: Json, forced: frozenset[str]) -> Json | None:
    """Return the event as it is."""
    return chunk


def strip_response(response: Json, forced: frozenset[str]) -> Json:
    """Return the response as it is."""
    return response


class MessageAssembler:
    """Puts a message back together from its events."""

    def __init__(self) -> None:
        self._message: Json = {"type": "message", "role": "assistant"}
        self._blocks: dict[int, Json] = {}
        self._json: dict[int, list[str]] = {}
        self._error: Any = None
        self._done = False

    def feed(self, chunk: Json) -> None:
        """Take one event."""
        kind = chunk.get("type")
        if kind == "message_start" and isinstance(chunk.get("message"), dict):
            self._message.update(chunk["message"])
        elif kind == "content_block_start" and isinstance(chunk.get("content_block"), dict):
            self._blocks[chunk.get("index", 0)] = dict(chunk["content_block"])
        elif kind == "content_block_delta":
            self._feed_delta(chunk.get("index", 0), chunk.get("delta") or {})
        elif kind == "message_delta":
            self._message.update(chunk.get("delta") or {})
            usage = chunk.get("usage")
            if isinstance(usage, dict):
                self._message["usage"] = {**(self._message.get("usage") or {}), **usage}
        elif kind == "message_stop":
            self._done = True
        elif kind == "error":
            self._error = chunk.get("error")

    def _feed_delta(self, index: int, delta: Json) -> None:
        block = self._blocks.setdefault(index, {"type": "text", "text": ""})
        for key, field in (("text", "text"), ("thinking", "thinking"), ("signature", "signature")):
            if isinstance(delta.get(key), str):
                block[field] = (block.get(field) or "") + delta[key]
        if isinstance(delta.get("partial_json"), str):
            self._json.setdefault(index, []).append(delta["partial_json"])
        if "citation" in delta:
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]

    def response(self) -> Json:
        """Return the message, as far as the stream got."""
        content = []
        for index, block in sorted(self._blocks.items()):
            if index in self._json:
                block = {**block, "input": _parsed("".join(self._json[index]))}
            content.append(block)
        whole = {**self._message, "content": content}
        return {**whole, "error": self._error} if self._error is not None else whole

    @property
    def done(self) -> bool:
        """Say whether the message was ended."""
        return self._done


def _parsed(text: str) -> Any:
    """Return the input of a tool call; text that is not whole stays text."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text


def assembler() -> MessageAssembler:
    """Return an empty assembler."""
    return MessageAssembler()


def completion(response: Json) -> Completion:
    """Read a message."""
    reason = response.get("stop_reason")
    return Completion(
        finish_reason=reason if isinstance(reason, str) else None,
        usage=as_dict(response.get("usage")) or None,
        error=as_dict(response.get("error")) or None,
    )


def sampled_in(chunk: Json) -> int:
    """Return 0: events do not name tokens."""
    return 0


def is_end(chunk: Json) -> bool:
    """Say whether an event ends the message."""
    return chunk.get("type") in ("message_stop", "error")


def completion_tokens(value: Json) -> int:
    """Return how many tokens were sampled in all, as far as the usage says."""
    return count_in(value.get("usage"), "output_tokens")


def take_prompt_ids(value: Json) -> list[int] | None:
    """Return None: messages carry no ids."""
    return None


def error(status: int, message: str) -> Json:
    """Return an error as Anthropic shapes it."""
    return {"type": "error", "error": {"type": error_kind(status), "message": message}}


def error_event(status: int, message: str) -> bytes:
    """Return an error as an event of a stream."""
    return event_bytes(dumps(error(status, message)), name="error")


def final_answer(body: Json, text: str) -> Json:
    """Return a message that says a text and ends the turn."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def stream(body: Json, response: Json) -> list[bytes]:
    """Return a message as the events of a stream."""
    usage = response.get("usage") or {}
    start = {**response, "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[Json] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(response.get("content") or ()):
        empty, delta = _opened_and_delta(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        if delta is not None:
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": response.get("stop_reason"), "stop_sequence": response.get("stop_sequence")}
    events.append({"type": "message_delta", "delta": end, "usage": usage})
    events.append({"type": "message_stop"})
    return [event_bytes(dumps(event), name=event["type"]) for event in events]


def _opened_and_delta(block: Json) -> tuple[Json, Json | None]:
    kind = block.get("type")
    if kind == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block.get("text") or ""}
    if kind == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block.get("thinking") or ""}
    if kind == "tool_use":
        arguments = json.dumps(block.get("input") or {})
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
    return block, None


def count_tokens(body: Json) -> Json:
    """Return an estimate."""
    return {"input_tokens": estimated_tokens(body, "system", "messages", "tools")}


def setting(body: Json) -> list[Any]:
    """Return the system text and the names of the tools."""
    return [_text(body.get("system")), sorted(str(tool.get("name")) for tool in dicts_in(body.get("tools")))]


def items(body: Json) -> list[Any]:
    """Return the messages, reduced to what makes two of them the same."""
    return [[message.get("role"), _reduced(message.get("content"))] for message in dicts_in(body.get("messages"))]


def reply_items(response: Json) -> list[Any]:
    """Return the assistant's message, reduced in the same way."""
    return [["assistant", _reduced(response.get("content"))]]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "".join(str(block.get("text") or "") for block in dicts_in(value))


def _reduced(content: Any) -> list[Any]:
    """Reduce content blocks: marks for caches and thoughts come and go between calls that are otherwise the same."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    reduced: list[Any] = []
    for block in as_list(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            reduced.append(["text", block.get("text")])
        elif kind == "tool_use":
            reduced.append(["tool_use", block.get("name"), block.get("input")])
        elif kind == "tool_result":
            reduced.append(["tool_result", block.get("tool_use_id"), _reduced(block.get("content"))])
        elif kind not in ("thinking", "redacted_thinking"):
            reduced.append(block)
    return reduced
