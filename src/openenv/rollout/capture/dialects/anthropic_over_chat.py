"""The bridge between an agent that speaks Anthropic messages and an endpoint that speaks OpenAI chat completions.

Thoughts of earlier turns and marks for caches do not reach the endpoint.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from ..encoding import Json
from . import anthropic
from .dialect import StreamTranslator, as_dict

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use"}
_COPIED = ("temperature", "top_p", "stream")


def request(body: Json) -> Json:
    """Return a request for messages as one for a chat completion."""
    sent: Json = {"model": body.get("model"), "messages": _messages(body)}
    sent.update({key: body[key] for key in _COPIED if key in body})
    if body.get("max_tokens") is not None:
        sent["max_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        sent["stop"] = body["stop_sequences"]
    tools = [_tool(tool) for tool in body.get("tools") or () if "input_schema" in tool]
    if tools:
        sent["tools"] = tools
        choice = _tool_choice(body.get("tool_choice"))
        if choice is not None:
            sent["tool_choice"] = choice
        if (body.get("tool_choice") or {}).get("disable_parallel_tool_use"):
            sent["parallel_tool_calls"] = False
    return sent


def _messages(body: Json) -> list[Json]:
    messages: list[Json] = []
    system = _plain(body.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in body.get("messages") or ():
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        messages += _assistant(blocks) if message.get("role") == "assistant" else _user(message.get("role"), blocks)
    return messages


def _assistant(blocks: list[Json]) -> list[Json]:
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
    return [message] if text or calls else []


def _user(role: Any, blocks: list[Json]) -> list[Json]:
    """Return what a user's message comes to: results of tools first, each a message, then the rest."""
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
        source = block.get("source") or {}
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": source.get("url") or data}}
    return None


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


def response(body: Json, response: Json) -> Json:
    """Return a chat completion as a message."""
    choice = (response.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    content: list[Json] = []
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thoughts, str) and thoughts:
        content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        content.append(
            {
                "type": "tool_use",
                "id": call.get("id") or _tool_id(),
                "name": function.get("name"),
                "input": _arguments(function.get("arguments")),
            }
        )
    whole = anthropic.final_answer(body, "")
    return {
        **whole,
        "content": content,
        "stop_reason": STOP_REASONS.get(str(choice.get("finish_reason")), "end_turn"),
        "usage": _usage(as_dict(response.get("usage"))),
    }


def _arguments(text: Any) -> Any:
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        return {"arguments": text}
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage.get("prompt_tokens") or 0,
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _tool_id() -> str:
    return f"toolu_{uuid.uuid4().hex}"


class MessageTranslator(StreamTranslator):
    """Turns the chunks of one chat completion into the events of a message: one content block open at a time."""

    def __init__(self, body: Json) -> None:
        super().__init__()
        self._body = body
        self._index = -1
        self._open: tuple[str, int] | None = None
        """The block that is open: its kind, and which of several tool calls."""

    def _start(self) -> None:
        message = {**anthropic.final_answer(self._body, ""), "content": [], "stop_reason": None}
        self._emit("message_start", message=message)

    def _end(self) -> None:
        self._close()
        if self._error is not None:
            self._out.append(anthropic.error_event(500, self._error))
            return
        end = {"stop_reason": STOP_REASONS.get(str(self._finish), "end_turn"), "stop_sequence": None}
        self._emit("message_delta", delta=end, usage=_usage(self._usage))
        self._emit("message_stop")

    def _think(self, text: str) -> None:
        self._block(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
        self._emit_delta({"type": "thinking_delta", "thinking": text})

    def _say(self, text: str) -> None:
        self._block(("text", 0), {"type": "text", "text": ""})
        self._emit_delta({"type": "text_delta", "text": text})

    def _call(self, call: Json, index: int, function: Json) -> None:
        start: Json = {
            "type": "tool_use",
            "id": call.get("id") or _tool_id(),
            "name": function.get("name"),
            "input": {},
        }
        self._block(("tool_use", index), start)
        if function.get("arguments"):
            self._emit_delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _block(self, key: tuple[str, int], empty: Json) -> None:
        """Open a block unless it is the open one; the one before it is closed."""
        if self._open == key:
            return
        self._close()
        self._open = key
        self._index += 1
        self._emit("content_block_start", index=self._index, content_block=empty)

    def _close(self) -> None:
        if self._open is not None:
            self._open = None
            self._emit("content_block_stop", index=self._index)

    def _emit_delta(self, delta: Json) -> None:
        self._emit("content_block_delta", index=self._index, delta=delta)


def translator(body: Json) -> MessageTranslator:
    """Return a translator for the events of one stream."""
    return MessageTranslator(body)
