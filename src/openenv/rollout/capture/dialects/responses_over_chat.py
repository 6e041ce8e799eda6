"""The bridge from agents with OpenAI responses to endpoints with OpenAI chat completions.

A custom tool, which takes free text, becomes a function with one argument, `input`. Tools that run at the provider,
such as web search, are removed.

    responses                                            chat completions
    instructions                                         {"role": "system", "content": ...}
    {"type": "message", "role": "developer", ...}        {"role": "system", "content": ...}
    {"type": "function_call", "call_id": "c1", ...}      {"role": "assistant", "tool_calls": [{"id": "c1", ...}]}
    {"type": "function_call_output", "call_id": "c1"}    {"role": "tool", "tool_call_id": "c1", "content": ...}
    {"type": "reasoning", ...}                           "reasoning_content", with `keep_thoughts`
    max_output_tokens                                    max_tokens
    text.format                                          response_format
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from ..encoding import Json, load_object
from .content import (
    encrypt_reasoning,
    extract_reasoning_from_responses_item,
    openai_responses_input_content_to_chat,
)
from .dialect import Bridge, StreamTranslator, count_in
from .openai_responses import empty_response, text_part

_COPIED = ("temperature", "top_p", "stream", "parallel_tool_calls")
_TEXT_TOOL = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input."}},
    "required": ["input"],
}


def request(body: Json, *, keep_thoughts: bool = False) -> Json:
    """Translate a request for a response to chat completions.

    Args:
        body: The request.
        keep_thoughts: Whether to send thoughts of earlier turns, as `reasoning_content`.
    """
    sent: Json = {"model": body.get("model"), "messages": _messages(body, keep_thoughts)}
    sent.update({key: body[key] for key in _COPIED if body.get(key) is not None})
    if body.get("max_output_tokens") is not None:
        sent["max_tokens"] = body["max_output_tokens"]
    tools = [tool for tool in map(_tool, _tools(body)) if tool is not None]
    if tools:
        sent["tools"] = tools
        choice = _tool_choice(body.get("tool_choice"))
        if choice is not None:
            sent["tool_choice"] = choice
    else:
        sent.pop("parallel_tool_calls", None)  # endpoints refuse it without tools
    # {"text": {"format": {"type": "json_schema", "name": ..., "schema": ...}}}: one level flatter than in chat.
    shape = (body.get("text") or {}).get("format") or {}
    if shape.get("type") == "json_schema":
        fields = {key: shape[key] for key in ("name", "schema", "strict") if key in shape}
        sent["response_format"] = {"type": "json_schema", "json_schema": fields}
    elif shape.get("type") == "json_object":
        sent["response_format"] = shape
    return sent


def _tools(body: Json) -> list[Json]:
    """Return the tools, with those inside namespaces."""
    # {"type": "namespace", "name": "files", "tools": [{"type": "function", ...}, ...]}
    tools: list[Json] = []
    for tool in body.get("tools") or ():
        tools += tool.get("tools") or () if tool.get("type") == "namespace" else [tool]
    return tools


def _tool(tool: Json) -> Json | None:
    if tool.get("type") == "function":
        fields = {
            key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None
        }
        return {"type": "function", "function": fields}
    if tool.get("type") == "custom":
        function = {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": _TEXT_TOOL}
        return {"type": "function", "function": function}
    return None


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("name"):
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice if choice in ("auto", "none", "required") else None


def _messages(body: Json, keep_thoughts: bool) -> list[Json]:
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    value = body.get("input")
    thoughts = ""
    for item in [{"role": "user", "content": value}] if isinstance(value, str) else list(value or ()):
        if keep_thoughts and item.get("type") == "reasoning":
            thoughts = "\n".join(filter(None, (thoughts, extract_reasoning_from_responses_item(item))))
            continue
        _add_item(messages, item)
        # A reasoning item comes before the items of its answer: attach it to the next assistant message.
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thoughts = thoughts, ""
    return messages


def _add_item(messages: list[Json], item: Json) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": openai_responses_input_content_to_chat(item.get("content"))})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
        function = {"name": item.get("name"), "arguments": arguments or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        # Text and parallel calls of one answer are separate items here, and one message in chat completions.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        text = openai_responses_input_content_to_chat(output) if isinstance(output, str | list) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})


class ResponseTranslator(StreamTranslator):
    """Turns the chunks of one chat completion into the events of a response."""

    # An item of `StreamTranslator` is an item of `output`. Its events, each with a `sequence_number`:
    #
    #     response.output_item.added       {"type": "message", "status": "in_progress", ...}
    #     response.content_part.added      messages only
    #     response.output_text.delta       or .reasoning_text, .function_call_arguments; once per chunk
    #     response.output_text.done
    #     response.content_part.done       messages only
    #     response.output_item.done        {"type": "message", "status": "completed", ...}

    def __init__(self, body: Json) -> None:
        super().__init__()
        self._custom = {str(tool.get("name")) for tool in _tools(body) if tool.get("type") == "custom"}
        self.whole = {**empty_response(body), "error": None, "incomplete_details": None}
        self._sequence = 0

    def _start(self) -> None:
        self._emit("response.created", response=self.whole)
        self._emit("response.in_progress", response=self.whole)

    def _think(self, text: str) -> None:
        self._open(("reasoning", 0), {"type": "reasoning", "summary": [], "content": []})
        self._emit_text("response.reasoning_text.delta", text, content_index=0)

    def _say(self, text: str) -> None:
        self._open(("message", 0), {"type": "message", "role": "assistant", "content": []})
        self._emit_text("response.output_text.delta", text, content_index=0, logprobs=[])

    def _call(self, call: Json, index: int, function: Json) -> None:
        key = ("call", index)
        if self._key != key:
            name = function.get("name") or ""
            kind, field = ("custom_tool_call", "input") if name in self._custom else ("function_call", "arguments")
            call_id = call.get("id") or f"call_{uuid.uuid4().hex}"
            self._open(key, {"type": kind, "call_id": call_id, "name": name, field: ""})
        text = function.get("arguments")
        if text and self._item["type"] == "function_call":
            self._emit_text("response.function_call_arguments.delta", text)
        elif text:  # a custom tool: its input is a JSON string inside the arguments, so wait for the whole arguments
            self._pieces.append(text)

    def _emit_text(self, kind: str, text: str, **fields: Any) -> None:
        self._pieces.append(text)
        self._emit(kind, **self._where, delta=text, **fields)

    def _item_opened(self, item: Json) -> None:
        prefix = {"message": "msg", "reasoning": "rs"}.get(item["type"], "fc")
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._emit("response.output_item.added", output_index=self._index, item=self._item)
        if item["type"] == "message":
            self._emit("response.content_part.added", **self._where, content_index=0, part=text_part(""))

    def _item_closed(self, item: Json, text: str) -> None:
        item["status"] = "completed"
        if item["type"] == "message":
            part = text_part(text)
            item["content"] = [part]
            self._emit("response.output_text.done", **self._where, content_index=0, text=text, logprobs=[])
            self._emit("response.content_part.done", **self._where, content_index=0, part=part)
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            item["encrypted_content"] = encrypt_reasoning(text)
            self._emit("response.reasoning_text.done", **self._where, content_index=0, text=text)
        elif item["type"] == "function_call":
            item["arguments"] = text
            self._emit("response.function_call_arguments.done", **self._where, arguments=text)
        else:
            # {"input": "the text"}, as `_TEXT_TOOL` asks. Some models write the bare text: keep it.
            value = (load_object(text) or {}).get("input")
            item["input"] = value if isinstance(value, str) else text
            self._emit("response.custom_tool_call_input.delta", **self._where, delta=item["input"])
            self._emit("response.custom_tool_call_input.done", **self._where, input=item["input"])
        self._emit("response.output_item.done", output_index=self._index, item=item)
        self.whole["output"].append(item)

    @property
    def _index(self) -> int:
        return len(self.whole["output"])

    @property
    def _where(self) -> Json:
        return {"item_id": self._item["id"], "output_index": self._index}

    def _end(self) -> None:
        self.whole["usage"] = _usage(self._usage)
        if self._error is not None:
            error = {"code": "server_error", "message": self._error}
            self.whole.update({"status": "failed", "error": error})
        elif self._finish == "length":
            self.whole.update({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}})
        else:
            self.whole["status"] = "completed"
        self._emit(f"response.{self.whole['status']}", response=self.whole)

    def _emit(self, kind: str, **fields: Any) -> None:
        super()._emit(kind, sequence_number=self._sequence, **fields)
        self._sequence += 1


def _usage(usage: Json) -> Json:
    prompt, completion = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": count_in(usage.get("prompt_tokens_details"), "cached_tokens")},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


RESPONSES_OVER_CHAT = Bridge(request, ResponseTranslator)
