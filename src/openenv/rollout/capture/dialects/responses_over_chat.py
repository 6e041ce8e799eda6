"""Lets an agent that speaks OpenAI responses talk to an endpoint that speaks OpenAI chat completions.

Knows values only, no IO. A tool that takes free text becomes a function with one argument, `input`. Tools that run at
the provider do not reach the endpoint.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from ..encoding import Json, dumps, event_bytes, load_object
from . import openai_responses

_COPIED = ("temperature", "top_p", "stream", "parallel_tool_calls")
_TEXT_TOOL = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input."}},
    "required": ["input"],
}


def request(body: Json) -> Json:
    """Return a request for a response as one for a chat completion."""
    sent: Json = {"model": body.get("model"), "messages": _messages(body)}
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
        sent.pop("parallel_tool_calls", None)
    shape = (body.get("text") or {}).get("format") or {}
    if shape.get("type") == "json_schema":
        kept = {key: shape[key] for key in ("name", "schema", "strict") if key in shape}
        sent["response_format"] = {"type": "json_schema", "json_schema": kept}
    elif shape.get("type") == "json_object":
        sent["response_format"] = shape
    return sent


def _tools(body: Json) -> list[Json]:
    """Return the tools, those of namespaces among them."""
    found: list[Json] = []
    for tool in body.get("tools") or ():
        found += tool.get("tools") or () if tool.get("type") == "namespace" else [tool]
    return found


def _tool(tool: Json) -> Json | None:
    if tool.get("type") == "function":
        kept = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
        return {"type": "function", "function": kept}
    if tool.get("type") == "custom":
        function = {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": _TEXT_TOOL}
        return {"type": "function", "function": function}
    return None


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("name"):
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice if choice in ("auto", "none", "required") else None


def _messages(body: Json) -> list[Json]:
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    for item in items:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Json], item: Json) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": _content(item.get("content"))})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
        function = {"name": item.get("name"), "arguments": arguments or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        text = (
            output if isinstance(output, str) else _content(output) if isinstance(output, list) else json.dumps(output)
        )
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})


def _content(content: Any) -> Any:
    """Return parts as chat completions have them; plain text where there is nothing else."""
    if not isinstance(content, list):
        return content
    parts: list[Json] = []
    for part in content:
        if part.get("type") in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text") or ""})
        elif part.get("type") == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def response(body: Json, response: Json) -> Json:
    """Return a chat completion as a response."""
    translator = ResponseTranslator(body)
    choice = (response.get("choices") or [{}])[0]
    message = dict(choice.get("message") or {})
    message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
    end = {"delta": message, "finish_reason": choice.get("finish_reason")}
    translator.feed({"choices": [end], "usage": response.get("usage"), "error": response.get("error")})
    translator.end()
    return translator.whole


class ResponseTranslator:
    """Turns the chunks of one chat completion into the events of a response."""

    def __init__(self, body: Json) -> None:
        self._custom = {str(tool.get("name")) for tool in _tools(body) if tool.get("type") == "custom"}
        self.whole: Json = {**openai_responses.final_answer(body, ""), "status": "in_progress", "output": []}
        """The response as it stands."""
        self.whole.update({"usage": None, "error": None, "incomplete_details": None})
        self._out: list[bytes] = []
        self._started = False
        self._sequence = 0
        self._item: Json | None = None
        self._key: tuple[str, int] | None = None
        self._text: list[str] = []
        self._finish: str | None = None
        self._usage: Any = None

    def feed(self, chunk: Json) -> bytes:
        """Take one chunk, and return the events that follow from it."""
        self._start()
        if chunk.get("error"):
            failed = chunk["error"]
            message = failed.get("message") if isinstance(failed, dict) else failed
            self.whole["error"] = {"code": "server_error", "message": str(message)}
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in (chunk.get("choices") or ())[:1]:
            self._feed_delta(choice.get("delta") or {})
            self._finish = choice.get("finish_reason") or self._finish
        return self._taken()

    def end(self) -> bytes:
        """Return the events that end the response."""
        self._start()
        self._close()
        self.whole["usage"] = _usage(self._usage)
        if self.whole["error"] is not None:
            self.whole["status"] = "failed"
        elif self._finish == "length":
            self.whole.update({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}})
        else:
            self.whole["status"] = "completed"
        self._emit(f"response.{self.whole['status']}", response=self.whole)
        return self._taken()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._emit("response.created", response=self.whole)
            self._emit("response.in_progress", response=self.whole)

    def _feed_delta(self, delta: Json) -> None:
        thoughts = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thoughts, str) and thoughts:
            self._open(("reasoning", 0), {"type": "reasoning", "summary": [], "content": []})
            self._say("response.reasoning_text.delta", thoughts, content_index=0)
        if isinstance(delta.get("content"), str) and delta["content"]:
            self._open(("message", 0), {"type": "message", "role": "assistant", "content": []})
            self._say("response.output_text.delta", delta["content"], content_index=0, logprobs=[])
        for call in delta.get("tool_calls") or ():
            self._feed_call(call)

    def _feed_call(self, call: Json) -> None:
        function = call.get("function") or {}
        key = ("call", call.get("index") or 0)
        if self._key != key:
            name = function.get("name") or ""
            kind = "custom_tool_call" if name in self._custom else "function_call"
            field = "input" if kind == "custom_tool_call" else "arguments"
            call_id = call.get("id") or f"call_{uuid.uuid4().hex}"
            self._open(key, {"type": kind, "call_id": call_id, "name": name, field: ""})
        text = function.get("arguments")
        if not text:
            return
        assert self._item is not None
        if self._item["type"] == "function_call":
            self._say("response.function_call_arguments.delta", text)
        else:  # what the tool takes is inside of the arguments: it is told once they are whole
            self._text.append(text)

    def _open(self, key: tuple[str, int], item: Json) -> None:
        """Have an item open; the one before it is closed."""
        if self._key == key:
            return
        self._close()
        prefix = {"message": "msg", "reasoning": "rs"}.get(item["type"], "fc")
        self._key = key
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._text = []
        self._emit("response.output_item.added", output_index=self._index, item=self._item)
        if item["type"] == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._emit("response.content_part.added", **self._where, content_index=0, part=part)

    def _say(self, kind: str, text: str, **fields: Any) -> None:
        self._text.append(text)
        self._emit(kind, **self._where, delta=text, **fields)

    def _close(self) -> None:
        item, self._key = self._item, None
        if item is None:
            return
        text = "".join(self._text)
        item["status"] = "completed"
        if item["type"] == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            item["content"] = [part]
            self._emit("response.output_text.done", **self._where, content_index=0, text=text, logprobs=[])
            self._emit("response.content_part.done", **self._where, content_index=0, part=part)
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            self._emit("response.reasoning_text.done", **self._where, content_index=0, text=text)
        elif item["type"] == "function_call":
            item["arguments"] = text
            self._emit("response.function_call_arguments.done", **self._where, arguments=text)
        else:
            given = (load_object(text) or {}).get("input")
            item["input"] = given if isinstance(given, str) else text
            self._emit("response.custom_tool_call_input.delta", **self._where, delta=item["input"])
            self._emit("response.custom_tool_call_input.done", **self._where, input=item["input"])
        self._emit("response.output_item.done", output_index=self._index, item=item)
        self.whole["output"].append(item)
        self._item = None

    @property
    def _index(self) -> int:
        return len(self.whole["output"])

    @property
    def _where(self) -> Json:
        return {"item_id": (self._item or {}).get("id"), "output_index": self._index}

    def _emit(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        self._out.append(event_bytes(dumps(event), name=kind))

    def _taken(self) -> bytes:
        out, self._out = self._out, []
        return b"".join(out)


def _usage(usage: Any) -> Json:
    given = usage if isinstance(usage, dict) else {}
    asked, said = given.get("prompt_tokens") or 0, given.get("completion_tokens") or 0
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + said,
    }


def translator(body: Json) -> ResponseTranslator:
    """Return a translator for the events of one stream."""
    return ResponseTranslator(body)
