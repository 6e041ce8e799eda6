"""Anthropic messages, for endpoints that implement them. The API reports neither token IDs nor log-probabilities."""

from __future__ import annotations

import json
import uuid
from typing import Any

from ...tasks.model_parameters import token_limit
from ..encoding import Json, dumps
from .dialect import (
    CallOptions,
    Completion,
    ModelDialect,
    RewrittenRequest,
    as_dict,
    as_list,
    capped,
    count_in,
    dicts_in,
    error_kind,
    size_of,
    typed_event,
)

MIN_THINKING = 1024
"""The API's minimum of `thinking.budget_tokens`."""
_WITH_INPUT = ("tool_use", "server_tool_use", "mcp_tool_use")


class MessageAssembler:
    """Assembles a message from its events (Anthropic API, "Streaming messages")."""

    #     message_start          {"message": {"id": ..., "content": [], "usage": {"input_tokens": 25, ...}}}
    #     content_block_start    {"index": 0, "content_block": {"type": "text", "text": ""}}
    #     content_block_delta    {"index": 0, "delta": {"type": "text_delta", "text": "Hello"}}
    #     content_block_stop     {"index": 0}
    #     message_delta          {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 15}}
    #     message_stop           {}
    #     error                  {"error": {"type": "overloaded_error", "message": "Overloaded"}}

    def __init__(self) -> None:
        self._message: Json = {"type": "message", "role": "assistant"}
        self._blocks: dict[int, Json] = {}
        self._json: dict[int, list[str]] = {}
        self._error: Any = None

    def feed(self, chunk: Json) -> None:
        kind = chunk.get("type")
        if kind == "message_start" and isinstance(chunk.get("message"), dict):
            self._message.update(chunk["message"])
        elif kind == "content_block_start" and isinstance(chunk.get("content_block"), dict):
            self._blocks[chunk.get("index", 0)] = dict(chunk["content_block"])
        elif kind == "content_block_delta":
            self._feed_delta(chunk.get("index", 0), chunk.get("delta") or {})
        elif kind == "message_delta":
            self._message.update(chunk.get("delta") or {})
            usage = chunk.get("usage")  # cumulative: replaces the counts of `message_start`
            if isinstance(usage, dict):
                self._message["usage"] = {**(self._message.get("usage") or {}), **usage}
        elif kind == "error":
            self._error = chunk.get("error")

    def _feed_delta(self, index: int, delta: Json) -> None:
        block = self._blocks.setdefault(index, {"type": "text", "text": ""})
        for key in ("text", "thinking", "signature"):
            if isinstance(delta.get(key), str):
                block[key] = (block.get(key) or "") + delta[key]
        # The input of a tool call comes as pieces of JSON text, and is parsed when all are there.
        if isinstance(delta.get("partial_json"), str):
            self._json.setdefault(index, []).append(delta["partial_json"])
        if "citation" in delta:
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]

    def response(self) -> Json:
        content = []
        for index, block in sorted(self._blocks.items()):
            if index in self._json:
                block = {**block, "input": _parsed("".join(self._json[index]))}
            content.append(block)
        whole = {**self._message, "content": content}
        return {**whole, "error": self._error} if self._error is not None else whole


def _parsed(text: str) -> Any:
    """Return the parsed input of a tool call; a text that was cut off stays a text."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text


class AnthropicMessages(ModelDialect):
    """`POST /v1/messages`."""

    name = "anthropic"
    path = "/messages"
    count_path = "/messages/count_tokens"
    counted_fields = ("system", "messages", "tools")
    assembler = MessageAssembler

    def rewrite(self, body: Json, options: CallOptions) -> RewrittenRequest:
        sent = options.applied_to(body)
        limit = capped(sent.get("max_tokens"), options.max_tokens)
        if options.max_tokens is not None:
            sent["max_tokens"] = limit
        budget = token_limit(as_dict(sent.get("thinking")).get("budget_tokens"))
        if options.disable_thinking:
            sent.pop("thinking", None)
        elif budget is not None and limit is not None and budget >= limit:
            # Anthropic API, "Extended thinking": `budget_tokens` must be less than `max_tokens`, and at least 1,024.
            thinking = {**sent.pop("thinking"), "budget_tokens": limit - 1}
            sent.update({"thinking": thinking} if limit > MIN_THINKING else {})
        return RewrittenRequest(sent, limit=limit)

    def completion(self, response: Json) -> Completion:
        # No tokens: the API reports no IDs, so `sampled` stays empty and the level of a call is `text`.
        reason = response.get("stop_reason")
        return Completion(
            finish_reason=reason if isinstance(reason, str) else None,
            usage=as_dict(response.get("usage")) or None,
            error=as_dict(response.get("error")) or None,
        )

    def text_size(self, value: Json) -> int:
        delta = as_dict(value.get("delta"))
        size = size_of(delta.get("text"), delta.get("thinking"), delta.get("partial_json"))
        for block in dicts_in(value.get("content")):
            size += size_of(block.get("text"), block.get("thinking"))
            size += len(dumps(block["input"])) if block.get("input") else 0
        return size

    def is_end(self, chunk: Json) -> bool:
        return chunk.get("type") in ("message_stop", "error")

    def completion_tokens(self, value: Json) -> int:
        return count_in(value.get("usage"), "output_tokens")

    def error(self, status: int, message: str) -> Json:
        return {"type": "error", "error": {"type": error_kind(status), "message": message}}

    def error_event(self, status: int, message: str) -> bytes:
        return typed_event(self.error(status, message))

    def final_answer(self, body: Json, text: str) -> Json:
        return {**empty_message(body), "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}

    def stream(self, body: Json, response: Json) -> list[bytes]:
        # One delta per text: the answer is complete, so smaller pieces would only cost time.
        start = {**response, "content": [], "stop_reason": None, "stop_sequence": None}
        events: list[Json] = [{"type": "message_start", "message": start}]
        for index, block in enumerate(response.get("content") or ()):
            empty, deltas = _opened_and_deltas(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": response.get("stop_reason"), "stop_sequence": response.get("stop_sequence")}
        events.append({"type": "message_delta", "delta": end, "usage": response.get("usage") or {}})
        events.append({"type": "message_stop"})
        return [typed_event(event) for event in events]

    def setting(self, body: Json) -> list[Any]:
        # Names only: descriptions of tools may contain the date or the working directory.
        return [_text(body.get("system")), sorted(str(tool.get("name")) for tool in dicts_in(body.get("tools")))]

    def items(self, body: Json) -> list[Any]:
        return [[message.get("role"), _reduced(message.get("content"))] for message in dicts_in(body.get("messages"))]

    def reply_items(self, response: Json) -> list[Any]:
        return [["assistant", _reduced(response.get("content"))]]


def empty_message(body: Json) -> Json:
    """Return the answer to a request, without content."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


# Clients empty these fields when a block starts, and fill them from its deltas only.
def _opened_and_deltas(block: Json) -> tuple[Json, list[Json]]:
    """Return a block as it starts, and the deltas with its content."""
    kind = block.get("type")
    if kind == "text":
        empty: Json = {**block, "text": ""}
        cited = [{"type": "citations_delta", "citation": each} for each in as_list(empty.pop("citations", None))]
        return empty, [{"type": "text_delta", "text": block.get("text") or ""}, *cited]
    if kind == "thinking":
        deltas: list[Json] = [{"type": "thinking_delta", "thinking": block.get("thinking") or ""}]
        if block.get("signature"):
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    if kind in _WITH_INPUT:
        value = block.get("input") or {}
        text = value if isinstance(value, str) else json.dumps(value)  # a text: it was cut off
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    return block, []


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "".join(str(block.get("text") or "") for block in dicts_in(value))


def _reduced(content: Any) -> list[Any]:
    """Return content blocks without thoughts and cache marks, which change between calls of one conversation."""
    # Claude Code moves {"cache_control": {"type": "ephemeral"}} to the last message with each call.
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
