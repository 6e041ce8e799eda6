"""The bridge from agents with Anthropic messages to endpoints with OpenAI chat completions.

Thoughts of earlier turns and cache marks are removed. So is the first line of Claude Code's system text: it changes
with each call, so no prompt would continue the one before.

    messages                                               chat completions
    system                                                 {"role": "system", "content": ...}
    {"type": "tool_use", "id": "t1", "input": {...}}       {"tool_calls": [{"id": "t1", "function": {...}}]}
    {"type": "tool_result", "tool_use_id": "t1", ...}      {"role": "tool", "tool_call_id": "t1", ...}
    {"type": "thinking", ...}                              "reasoning_content", with `keep_thoughts`
    stop_sequences                                         stop
    tool_choice {"type": "any"}                            tool_choice "required"
    stop_reason "tool_use", "max_tokens"                   finish_reason "tool_calls", "length"
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from ..encoding import Json
from .anthropic import empty_message
from .content import (
    anthropic_document_to_text,
    anthropic_image_to_openai_chat,
    extract_reasoning_from_anthropic_content,
    make_signature,
)
from .dialect import Bridge, StreamTranslator, count_in, error_kind

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
# The line has a new value with each call.
_BILLING = re.compile(r"^\s*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE)
_COPIED = ("temperature", "top_p", "top_k", "stream")


def request(body: Json, *, keep_thoughts: bool = False) -> Json:
    """Translate a request for messages to chat completions.

    Args:
        body: The request.
        keep_thoughts: Whether to send thoughts of earlier turns, as `reasoning_content`.
    """
    sent: Json = {"model": body.get("model"), "messages": _messages(body, keep_thoughts)}
    sent.update({key: body[key] for key in _COPIED if key in body})
    if body.get("max_tokens") is not None:
        sent["max_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        sent["stop"] = body["stop_sequences"]
    # Tools without a schema run at the provider: {"type": "web_search_20250305", "name": "web_search"}.
    tools = [_tool(tool) for tool in body.get("tools") or () if "input_schema" in tool]
    if tools:
        sent["tools"] = tools
        choice = _tool_choice(body.get("tool_choice"))
        if choice is not None:
            sent["tool_choice"] = choice
        if (body.get("tool_choice") or {}).get("disable_parallel_tool_use"):
            sent["parallel_tool_calls"] = False
    return sent


def _messages(body: Json, keep_thoughts: bool) -> list[Json]:
    messages: list[Json] = []
    system = _BILLING.sub("", _plain(body.get("system")))
    if system:
        messages.append({"role": "system", "content": system})
    for message in body.get("messages") or ():
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        if message.get("role") == "assistant":
            messages += _assistant(blocks, extract_reasoning_from_anthropic_content(blocks) if keep_thoughts else "")
        else:
            messages += _user(message.get("role"), blocks)
    return messages


def _assistant(blocks: list[Json], thoughts: str) -> list[Json]:
    text = "".join(block.get("text") or "" for block in blocks if block.get("type") == "text")
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    message: Json = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return [message] if text or calls or thoughts else []


def _user(role: Any, blocks: list[Json]) -> list[Json]:
    """Return one message per tool result, then one with the other parts."""
    # Chat completions require the results directly after the calls, so a text before a result moves behind it.
    results = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _plain(block.get("content"))}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    parts = [part for part in map(_part, blocks) if part is not None]
    if not parts:
        return results
    texts = [part["text"] for part in parts if part["type"] == "text"]
    content: Any = "\n".join(texts) if len(texts) == len(parts) else parts
    return [*results, {"role": role or "user", "content": content}]


def _part(block: Json) -> Json | None:
    if block.get("type") == "text":
        return {"type": "text", "text": block.get("text") or ""}
    if block.get("type") == "image":
        return anthropic_image_to_openai_chat(block)
    document = anthropic_document_to_text(block) if block.get("type") == "document" else ""
    return {"type": "text", "text": document} if document else None


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "\n".join(str(block.get("text") or "") for block in blocks if block.get("type") == "text")


def _tool(tool: Json) -> Json:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"auto": "auto", "any": "required", "none": "none"}.get(str(kind))


def _arguments(text: Any) -> Any:
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        return {"arguments": text}
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def _usage(usage: Json) -> Json:
    cached = count_in(usage.get("prompt_tokens_details"), "cached_tokens")
    # `prompt_tokens` includes cached tokens; `input_tokens` does not.
    return {
        "input_tokens": max(0, count_in(usage, "prompt_tokens") - cached),
        "output_tokens": count_in(usage, "completion_tokens"),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


class MessageTranslator(StreamTranslator):
    """Turns the chunks of one chat completion into the events of a message."""

    # An item of `StreamTranslator` is a content block:
    #
    #     message_start
    #         content_block_start        {"index": 0, "content_block": {"type": "text", "text": ""}}
    #         content_block_delta        {"index": 0, "delta": {"type": "text_delta", "text": "Hel"}}, once per chunk
    #         content_block_stop         {"index": 0}
    #     message_delta                  {"delta": {"stop_reason": "end_turn"}, "usage": {...}}
    #     message_stop

    def __init__(self, body: Json, *, stop_reasons: Mapping[str, str] = STOP_REASONS) -> None:
        super().__init__()
        self.whole = empty_message(body)
        self._stop_reasons = stop_reasons

    def _start(self) -> None:
        self._emit("message_start", message=self.whole)

    def _think(self, text: str) -> None:
        self._open(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
        self._emit_delta("thinking_delta", "thinking", text)

    def _say(self, text: str) -> None:
        self._open(("text", 0), {"type": "text", "text": ""})
        self._emit_delta("text_delta", "text", text)

    def _call(self, call: Json, index: int, function: Json) -> None:
        call_id = call.get("id") or f"toolu_{uuid.uuid4().hex}"
        self._open(("input", index), {"type": "tool_use", "id": call_id, "name": function.get("name"), "input": {}})
        if function.get("arguments"):
            self._emit_delta("input_json_delta", "partial_json", function["arguments"])

    def _emit_delta(self, kind: str, field: str, text: str) -> None:
        self._pieces.append(text)
        self._emit("content_block_delta", index=self._index, delta={"type": kind, field: text})

    def _item_opened(self, item: Json) -> None:
        self._emit("content_block_start", index=self._index, content_block=item)

    def _item_closed(self, item: Json, text: str) -> None:
        closed = {"input": _arguments(text)} if item["type"] == "tool_use" else {item["type"]: text}
        if item["type"] == "thinking":  # clients drop thoughts without a signature from later requests
            closed["signature"] = make_signature(text)
            self._emit(
                "content_block_delta",
                index=self._index,
                delta={"type": "signature_delta", "signature": closed["signature"]},
            )
        self._emit("content_block_stop", index=self._index)
        self.whole["content"].append({**item, **closed})

    @property
    def _index(self) -> int:
        return len(self.whole["content"])

    def _end(self) -> None:
        if not self.whole["content"] and self._error is None:  # clients expect a block
            self._open(("text", 0), {"type": "text", "text": ""})
            self._close()
        end = {"stop_reason": self._stop_reasons.get(str(self._finish), "end_turn"), "stop_sequence": None}
        self.whole.update(end, usage=_usage(self._usage))
        if self._error is not None:
            error = {"type": error_kind(500), "message": self._error}
            self._emit("error", error=error)
        else:
            self._emit("message_delta", delta=end, usage=self.whole["usage"])
            self._emit("message_stop")


ANTHROPIC_OVER_CHAT = Bridge(request, MessageTranslator)
