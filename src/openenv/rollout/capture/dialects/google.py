"""Google's `generateContent`, for gemini-cli and Google's clients, and its bridge to chat completions.

    POST /v1beta/models/MODEL:generateContent             the answer in one piece
    POST /v1beta/models/MODEL:streamGenerateContent       the answer as events
    POST /v1beta/models/MODEL:countTokens

The path has the model and the streaming flag, not the body. Thoughts of earlier turns are removed.

    generateContent                                           chat completions
    systemInstruction.parts                                   {"role": "system", "content": ...}
    {"role": "model", "parts": [{"text": ...}]}               {"role": "assistant", "content": ...}
    {"functionCall": {"name": "ls", "args": {...}}}           {"tool_calls": [{"id": "call_1_ls", ...}]}
    {"functionResponse": {"name": "ls", "response": ...}}     {"role": "tool", "tool_call_id": "call_1_ls", ...}
    generationConfig.maxOutputTokens                          max_tokens
    functionCallingConfig.mode "ANY"                          tool_choice "required"
    finishReason "MAX_TOKENS"                                 finish_reason "length"
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from ..encoding import Json, dumps, event_bytes
from .content import (
    extract_reasoning_from_gemini_parts,
    google_content_parts_to_openai_chat,
    google_part_to_openai_chat,
    make_google_signature,
    openai_chat_content_to_google_parts,
)
from .dialect import AgentDialect, Bridge, StreamTranslator, as_dict, as_list, count_in, dicts_in, text_length

ACTIONS = {"generatecontent": "call", "streamgeneratecontent": "call", "counttokens": "count"}
"""Keys are the actions of paths, after the colon and in lower case; values are kinds of `Route`."""
FINISH_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY", "tool_calls": "STOP"}
_CONFIG = {
    "maxOutputTokens": "max_tokens",
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "stopSequences": "stop",
    "candidateCount": "n",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "seed": "seed",
    "logprobs": "top_logprobs",
}
"""Fields of `generationConfig`, and their names in chat completions."""
# `google.rpc.Code` of HTTP statuses; all others are INTERNAL.
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def action_of(path: str) -> str | None:
    """Return the action of a path, one of `ACTIONS`; None for a path of another dialect."""
    action = path.rpartition("/")[2].rpartition(":")[2].lower()
    return action if ":" in path and action in ACTIONS else None


class GoogleGenerate(AgentDialect):
    """`POST /v1beta/models/MODEL:generateContent`."""

    name = "google"
    counted_fields = ("contents", "systemInstruction", "system_instruction", "tools")

    def read(self, path: str, body: Json) -> Json:
        model = path.rpartition("/")[2].rpartition(":")[0]
        count = _config(body).get("candidateCount")
        changes: Json = {"stream": action_of(path) == "streamgeneratecontent"}
        changes |= {"model": model} if model else {}
        changes |= {"n": count} if count is not None else {}
        return {**body, **changes}

    def error(self, status: int, message: str) -> Json:
        return {"error": {"code": status, "message": message, "status": _STATUSES.get(status, "INTERNAL")}}

    def error_event(self, status: int, message: str) -> bytes:
        return event_bytes(dumps(self.error(status, message)))

    def final_answer(self, body: Json, text: str) -> Json:
        return {**empty_answer(body), "candidates": [_candidate([{"text": text}], "stop")]}

    def stream(self, body: Json, response: Json) -> list[bytes]:
        return [event_bytes(dumps(response))]  # each event is a whole `GenerateContentResponse`; one is enough

    def count_tokens(self, body: Json) -> Json:
        request = as_dict(body.get("generateContentRequest")) or body
        characters = sum(text_length(request.get(name)) for name in self.counted_fields)
        count = max(1, characters // 4)
        details = [{"modality": "TEXT", "tokenCount": count}]
        return {"totalTokens": count, "totalBillableCharacters": characters, "promptTokensDetails": details}


def empty_answer(body: Json) -> Json:
    """Return the answer to a request, without candidates."""
    return {
        "candidates": [],
        "usageMetadata": usage_metadata({}),
        "modelVersion": body.get("model") or "",
        "responseId": uuid.uuid4().hex,
    }


def usage_metadata(usage: Json) -> Json:
    """Return the usage of a chat completion as `usageMetadata`."""
    prompt, sampled = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
    total = count_in(usage, "total_tokens") or prompt + sampled
    counts = {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": total}
    cached = count_in(usage.get("prompt_tokens_details"), "cached_tokens") or count_in(usage, "cached_tokens")
    return {**counts, "cachedContentTokenCount": cached} if cached else counts


def _candidate(parts: list[Json], finish: str | None = None) -> Json:
    candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": 0}
    return {**candidate, "finishReason": FINISH_REASONS.get(finish, "STOP")} if finish else candidate


# the request


def request(body: Json, *, keep_thoughts: bool = False) -> Json:
    """Translate a request to chat completions.

    Args:
        body: The request.
        keep_thoughts: Whether to send thoughts of earlier turns, as `reasoning_content`.
    """
    # Some clients wrap all options in `config`, like the Python SDK's `GenerateContentConfig`.
    section, config = as_dict(body.get("config")), _config(body)
    # The first system instruction counts: the body's, else the one in `config`.
    messages: list[Json] = []
    for holder in (body, section):
        system = _system_text(holder.get("systemInstruction") or holder.get("system_instruction"))
        if system and not messages:
            messages.append({"role": "system", "content": system})
    ids = _CallIds()
    for content in dicts_in(body.get("contents")):
        messages += _messages(content, ids, keep_thoughts)
    sent: Json = {"messages": messages}
    sent |= {name: body[name] for name in ("model", "stream") if name in body}
    sent |= {name: config[field] for field, name in _CONFIG.items() if field in config}
    shape = _response_format(config)
    if shape is not None:
        sent["response_format"] = shape
    thinking = as_dict(config.get("thinkingConfig") or section.get("thinkingConfig"))
    if thinking.get("includeThoughts"):
        sent["chat_template_kwargs"] = {"enable_thinking": True}
    tools = _tools(body.get("tools") or section.get("tools"))
    if tools:
        sent["tools"] = tools
        choice = _tool_choice(body.get("toolConfig") or section.get("toolConfig") or body.get("tool_config"))
        if choice is not None:
            sent["tool_choice"] = choice
    return sent


def _config(body: Json) -> Json:
    """Return `generationConfig`, in one of the three places where clients put it."""
    section = as_dict(body.get("config"))
    holders = (section.get("generationConfig"), body.get("generation_config"), body.get("generationConfig"))
    merged: Json = {}
    for holder in holders:
        merged |= as_dict(holder)
    return merged or section


def _system_text(instruction: object) -> str:
    if isinstance(instruction, str):
        return instruction
    parts = as_dict(instruction).get("parts") if isinstance(instruction, dict) else instruction
    return _joined(parts)


def _joined(parts: object) -> str:
    texts = (part if isinstance(part, str) else as_dict(part).get("text") for part in as_list(parts))
    return "\n".join(text for text in texts if isinstance(text, str))


class _CallIds:
    """Assigns IDs to tool calls. Google's clients may omit them: then results match calls by name, in order."""

    #     functionCall      {"name": "ls"}, {"name": "ls"}        -> call_1_ls, call_2_ls
    #     functionResponse  {"name": "ls"}, {"name": "ls"}        -> call_1_ls, call_2_ls

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []

    def opened(self, call: Json) -> str:
        """Return the ID of a call, and remember the call as open."""
        self._count += 1
        name = str(call.get("name") or "")
        call_id = str(call.get("id") or call.get("call_id") or "") or f"call_{self._count}_{name}"
        self._open.append((name, call_id))
        return call_id

    def answered(self, result: Json) -> str:
        """Return the ID of the call of a result."""
        name = str(result.get("name") or "")
        call_id = str(result.get("id") or result.get("call_id") or "")
        for pair in self._open:
            if pair[1] == call_id or (not call_id and pair[0] == name):
                self._open.remove(pair)
                return pair[1]
        return call_id or name


def _messages(content: Json, ids: _CallIds, keep_thoughts: bool) -> Iterator[Json]:
    parts, role = as_list(content.get("parts")), content.get("role", "user")
    if role in ("system", "developer"):
        text = _joined(parts)
        if text:
            yield {"role": "system", "content": text}
        return
    text_or_images = google_content_parts_to_openai_chat(parts)
    # One turn of Google may be several messages here: the user's text, then one message per tool result.
    if role == "model":
        calls = [_tool_call(part["functionCall"], ids) for part in _with(parts, "functionCall")]
        thoughts = extract_reasoning_from_gemini_parts(parts) if keep_thoughts else ""
        if text_or_images or calls or thoughts:
            message: Json = {"role": "assistant", "content": text_or_images}
            message |= {"reasoning_content": thoughts} if thoughts else {}
            yield {**message, "tool_calls": calls} if calls else message
        return
    if any(isinstance(part, str) or _is_shown(part) for part in parts):
        yield {"role": "user", "content": text_or_images}
    for part in _with(parts, "functionResponse"):
        result = part["functionResponse"]
        yield {"role": "tool", "tool_call_id": ids.answered(result), "content": json.dumps(result.get("response", {}))}


def _with(parts: list[Any], field: str) -> list[Json]:
    return [part for part in dicts_in(parts) if isinstance(part.get(field), dict)]


def _is_shown(part: object) -> bool:
    """Return whether a part is a text or an image."""
    fields = as_dict(part)
    return isinstance(fields.get("text"), str) or google_part_to_openai_chat(fields) is not None


def _tool_call(call: Json, ids: _CallIds) -> Json:
    function = {"name": call.get("name", ""), "arguments": json.dumps(call.get("args", {}))}
    return {"id": ids.opened(call), "type": "function", "function": function}


def _tools(tools: object) -> list[Json]:
    """Return the declared functions, without tools that run at Google, such as search."""
    functions: list[Json] = []
    for tool in dicts_in(tools):
        for declared in dicts_in(tool.get("functionDeclarations") or tool.get("function_declarations")):
            if not isinstance(declared.get("name"), str) or not declared["name"]:
                continue
            schema = declared.get("parameters") or declared.get("parametersJsonSchema")
            schema = schema or declared.get("parameters_json_schema")
            function: Json = {"name": declared["name"]}
            function |= {"description": declared["description"]} if declared.get("description") else {}
            function["parameters"] = schema if isinstance(schema, dict) else {"type": "object", "properties": {}}
            functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(config: object) -> Any:
    holder = as_dict(config)
    calling = as_dict(holder.get("functionCallingConfig") or holder.get("function_calling_config"))
    mode = str(calling.get("mode", "")).upper()
    if mode == "NONE":
        return "none"
    if mode not in ("ANY", "VALIDATED"):
        return None
    # Chat completions can force one function or any. Several allowed functions become any.
    allowed = as_list(calling.get("allowedFunctionNames") or calling.get("allowed_function_names"))
    if len(allowed) == 1 and allowed[0]:
        return {"type": "function", "function": {"name": allowed[0]}}
    return "required"


def _response_format(config: Json) -> Json | None:
    text = as_dict(as_dict(config.get("responseFormat")).get("text"))
    if str(text.get("mimeType")).lower() in ("application/json", "application_json"):
        return _json_format(text.get("schema"))
    if str(config.get("responseMimeType")).lower() not in ("application/json", "application_json"):
        return None
    # `responseSchema` is the older subset of OpenAPI; the others are JSON Schema.
    names = ("responseJsonSchema", "_responseJsonSchema", "responseSchema")
    return _json_format(next((config[name] for name in names if config.get(name)), None))


def _json_format(schema: object) -> Json:
    if not isinstance(schema, dict) or not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


# the answer


class ContentTranslator(StreamTranslator):
    """Turns the chunks of one chat completion into Google's events; each event has the new parts only."""

    def __init__(self, body: Json) -> None:
        super().__init__()
        self.whole = {**empty_answer(body), "candidates": [_candidate([])]}
        self._parts: list[Json] = self.whole["candidates"][0]["content"]["parts"]

    def _start(self) -> None:
        pass

    def _think(self, text: str) -> None:
        self._open(("thought", 0), {"thought": True, "text": ""})
        self._pieces.append(text)
        self._send([{"thought": True, "text": text, "thoughtSignature": make_google_signature(text)}])

    def _say(self, text: str) -> None:
        self._open(("text", 0), {"text": ""})
        self._pieces.append(text)
        self._send([{"text": text}])

    def _call(self, call: Json, index: int, function: Json) -> None:
        self._open(("call", index), {"functionCall": {"name": function.get("name") or "", "id": call.get("id") or ""}})
        if function.get("arguments"):  # Google has no pieces of arguments: the call is sent when it is whole
            self._pieces.append(function["arguments"])

    def _item_opened(self, item: Json) -> None:
        pass

    def _item_closed(self, item: Json, text: str) -> None:
        if "functionCall" in item:
            part = function_call_part(item["functionCall"]["name"], text, item["functionCall"]["id"])
            self._send([part])
        else:
            part = {**item, "text": text}
            part |= {"thoughtSignature": make_google_signature(text)} if item.get("thought") else {}
        self._parts.append(part)

    def _end(self) -> None:
        usage = usage_metadata(self._usage)
        end = _candidate([], self._finish or "stop")
        self.whole["candidates"][0]["finishReason"] = end["finishReason"]
        self.whole["usageMetadata"] = usage
        # Google has no event for errors: an object with `error` ends the stream.
        if self._error is not None:
            self._out.append({"error": {"code": 500, "message": self._error, "status": "INTERNAL"}})
            return
        self._out.append({**self.whole, "candidates": [end]})

    def encode(self, event: Json) -> bytes:
        return event_bytes(dumps(event))

    def _send(self, parts: list[Json]) -> None:
        head = {name: self.whole[name] for name in ("modelVersion", "responseId")}
        self._out.append({"candidates": [_candidate(parts)], **head})


def function_call_part(name: str, arguments: Any, call_id: str) -> Json:
    """Return a tool call as a part; invalid JSON becomes {"raw": text}."""
    args = arguments
    if isinstance(arguments, str):
        try:
            args = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            args = {"raw": arguments.strip()}
    call = {"name": name, "args": {} if args is None else args}
    return {"functionCall": {**call, "id": call_id} if call_id else call}


def message_parts(message: Json) -> list[Json]:
    """Return the message of a chat completion as Google's parts: its thoughts, its text, its tool calls."""
    parts: list[Json] = []
    thoughts = message.get("reasoning_content")
    if isinstance(thoughts, str) and thoughts:
        parts.append({"thought": True, "text": thoughts, "thoughtSignature": make_google_signature(thoughts)})
    if message.get("content"):
        parts += openai_chat_content_to_google_parts(message["content"])
    for call in dicts_in(message.get("tool_calls")):
        function = as_dict(call.get("function"))
        if function.get("name"):
            parts.append(function_call_part(function["name"], function.get("arguments", ""), str(call.get("id") or "")))
    return parts


GOOGLE_OVER_CHAT = Bridge(request, ContentTranslator)
