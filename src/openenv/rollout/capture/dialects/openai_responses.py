"""OpenAI responses, for endpoints that implement them. They report log-probabilities of texts, and no token IDs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from ..encoding import Json
from .dialect import (
    LOGPROBS,
    CallOptions,
    Completion,
    ModelDialect,
    RewrittenRequest,
    TokenLog,
    as_dict,
    as_list,
    capped,
    count_in,
    dicts_in,
    error_kind,
    size_of,
    typed_event,
)

INCLUDE = "message.output_text.logprobs"  # the value of `include` that asks for log-probabilities

_INPUTS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""The kinds of tool calls: the field of their input, and the name of its events."""
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})


class ResponseAssembler:
    """Assembles a response from its events (OpenAI API, "Streaming events")."""

    #     response.created                  {"response": {"id": ..., "status": "in_progress", "output": []}}
    #     response.output_item.added        {"output_index": 0, "item": {"type": "message", "content": []}}
    #     response.content_part.added       {"output_index": 0, "content_index": 0, "part": {...}}
    #     response.output_text.delta        {"output_index": 0, "content_index": 0, "delta": "4", "logprobs": [...]}
    #     response.output_item.done         {"output_index": 0, "item": {...}}
    #     response.completed                {"response": {"status": "completed", "output": [...], "usage": {...}}}
    #
    # The last event has the whole response. The others matter if the stream breaks off before it.

    def __init__(self) -> None:
        self._response: Json = {"object": "response", "status": "in_progress"}
        self._items: dict[int, Json] = {}
        self._done = False

    def feed(self, chunk: Json) -> None:
        kind = str(chunk.get("type"))
        if isinstance(chunk.get("response"), dict):
            self._response.update(chunk["response"])
            self._done = self._done or kind in _ENDS  # `response.created` has a response too, without output
        elif kind == "error":
            self._response["error"] = chunk.get("error") or {"message": chunk.get("message")}
            self._done = True
        elif kind in ("response.output_item.added", "response.output_item.done"):
            if isinstance(chunk.get("item"), dict):
                self._items[chunk.get("output_index", 0)] = dict(chunk["item"])
        elif kind.startswith("response.") and "output_index" in chunk:
            self._feed_item(kind, chunk, self._items.setdefault(chunk["output_index"], {"type": "message"}))

    def _feed_item(self, kind: str, chunk: Json, item: Json) -> None:
        delta = chunk.get("delta")
        if kind == "response.content_part.added":
            self._part(item, chunk).update(chunk.get("part") or {})
        elif kind == "response.output_text.delta" and isinstance(delta, str):
            part = self._part(item, chunk)
            part["text"] = (part.get("text") or "") + delta
            part["logprobs"] = [*(part.get("logprobs") or ()), *(chunk.get("logprobs") or ())]
        elif kind == "response.function_call_arguments.delta" and isinstance(delta, str):
            item["arguments"] = (item.get("arguments") or "") + delta
        elif kind.startswith("response.reasoning") and isinstance(delta, str):
            item["text_so_far"] = (item.get("text_so_far") or "") + delta

    @staticmethod
    def _part(item: Json, chunk: Json) -> Json:
        content = item.setdefault("content", [])
        index = chunk.get("content_index", 0)
        # A delta may come without its `content_part.added`.
        while len(content) <= index:
            content.append({"type": "output_text", "text": ""})
        part: Json = content[index]
        return part

    def response(self) -> Json:
        if self._done and self._response.get("output"):
            return self._response
        return {**self._response, "output": [item for _, item in sorted(self._items.items())]}


class OpenAIResponses(ModelDialect):
    """`POST /v1/responses`."""

    name = "openai_responses"
    path = "/responses"
    count_path = "/responses/input_tokens"
    counted_fields = ("instructions", "input", "tools")
    assembler = ResponseAssembler

    def rewrite(self, body: Json, options: CallOptions) -> RewrittenRequest:
        sent = options.applied_to(body)
        forced: set[str] = set()
        included = as_list(sent.get("include"))
        if options.allows(LOGPROBS) and INCLUDE not in included:
            forced.add(LOGPROBS)
            sent["include"] = [*included, INCLUDE]
            if options.top_logprobs > 0 and options.allows("top_logprobs"):
                sent["top_logprobs"] = options.top_logprobs
        limit = capped(sent.get("max_output_tokens"), options.max_tokens)
        if options.max_tokens is not None:
            sent["max_output_tokens"] = limit
        return RewrittenRequest(sent, frozenset(forced), limit)

    def strip_event(self, chunk: Json, forced: frozenset[str]) -> Json | None:
        if LOGPROBS not in forced:
            return chunk
        # Log-probabilities are at the top of a delta, and inside of `part`, `item` and `response` in other events.
        visible = _without_logprobs(chunk)
        for key, strip in (("part", _without_logprobs), ("item", _strip_item), ("response", _strip_whole)):
            inner = visible.get(key)
            if isinstance(inner, dict):
                stripped = strip(inner)
                if stripped is not inner:
                    visible = {**visible, key: stripped}
        return visible

    def strip_response(self, response: Json, forced: frozenset[str]) -> Json:
        return _strip_whole(response) if LOGPROBS in forced else response

    def completion(self, response: Json) -> Completion:
        log = TokenLog()
        output = dicts_in(response.get("output"))
        for item in output:
            for part in dicts_in(item.get("content")):
                if part.get("type") == "output_text":
                    log.add(None, part.get("logprobs"))
        return Completion(
            finish_reason=_finish_reason(response, output),
            sampled=log.sampled(),
            usage=as_dict(response.get("usage")) or None,
            error=as_dict(response.get("error")) or None,
        )

    def sampled_in(self, chunk: Json) -> int:
        return len(as_list(chunk.get("logprobs"))) if chunk.get("type") == "response.output_text.delta" else 0

    def text_size(self, value: Json) -> int:
        size = size_of(value.get("delta"))
        for item in dicts_in(value.get("output")):
            size += size_of(item.get("arguments"), item.get("input"))
            for part in (*dicts_in(item.get("content")), *dicts_in(item.get("summary"))):
                size += size_of(part.get("text"))
        return size

    def is_end(self, chunk: Json) -> bool:
        return chunk.get("type") in _ENDS

    def completion_tokens(self, value: Json) -> int:
        return count_in((as_dict(value.get("response")) or value).get("usage"), "output_tokens")

    def error(self, status: int, message: str) -> Json:
        return {"error": {"message": message, "type": error_kind(status), "param": None, "code": str(status)}}

    def error_event(self, status: int, message: str) -> bytes:
        # Clients read the error from a failed response; the event `error` has a different shape.
        failed: Json = {"id": "", "object": "response", "status": "failed", "output": []}
        failed["error"] = {"code": "server_error", "message": message}
        return typed_event({"type": "response.failed", "response": failed})

    def final_answer(self, body: Json, text: str) -> Json:
        item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed"}
        usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        return {
            **empty_response(body),
            "status": "completed",
            "output": [{**item, "content": [text_part(text)]}],
            "usage": usage,
        }

    def stream(self, body: Json, response: Json) -> list[bytes]:
        begun = {**response, "status": "in_progress", "output": [], "usage": None}
        events: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(response.get("output") or ()):
            events += _item_events(index, item)
        end = {"incomplete": "response.incomplete", "failed": "response.failed"}
        events.append({"type": end.get(str(response.get("status")), "response.completed"), "response": response})
        return [typed_event({**event, "sequence_number": number}) for number, event in enumerate(events)]

    def count_tokens(self, body: Json) -> Json:
        return {"object": "response.input_tokens", **super().count_tokens(body)}

    def setting(self, body: Json) -> list[Any]:
        names = sorted(str(tool.get("name") or tool.get("type")) for tool in dicts_in(body.get("tools")))
        return [body.get("instructions") or "", names]

    def items(self, body: Json) -> list[Any]:
        value = body.get("input")
        if isinstance(value, str):
            return [["user", value]]
        return [item for item in map(_reduced, as_list(value)) if item is not None]

    def reply_items(self, response: Json) -> list[Any]:
        return [item for item in map(_reduced, response.get("output") or ()) if item is not None]


def empty_response(body: Json) -> Json:
    """Return the response to a request, without output."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": body.get("model") or "",
        "output": [],
        "usage": None,
    }


def text_part(text: str) -> Json:
    """Return a text as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _without_logprobs(value: Json) -> Json:
    return {**value, "logprobs": []} if value.get("logprobs") else value


def _with_each(value: Json, key: str, strip: Callable[[Json], Json]) -> Json:
    """Strip each object of a list; return the same value if nothing changes, so that it is not encoded again."""
    items = value.get(key)
    if not isinstance(items, list):
        return value
    stripped = [strip(item) if isinstance(item, dict) else item for item in items]
    same = all(one is other for one, other in zip(items, stripped, strict=True))
    return value if same else {**value, key: stripped}


def _strip_item(item: Json) -> Json:
    return _with_each(item, "content", _without_logprobs)


def _strip_whole(response: Json) -> Json:
    visible = {**response, "top_logprobs": 0} if response.get("top_logprobs") else response
    return _with_each(visible, "output", _strip_item)


def _finish_reason(response: Json, output: list[Json]) -> str | None:
    status = response.get("status")
    # {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    if status == "incomplete":
        reason = (response.get("incomplete_details") or {}).get("reason")
        return "length" if reason == "max_output_tokens" else str(reason)
    if status != "completed":
        return None
    return "tool_calls" if any(str(item.get("type")).endswith("_call") for item in output) else "stop"


def _item_events(index: int, item: Json) -> list[Json]:
    # The same order of events as a stream of the API; see `ResponseAssembler`.
    where: Json = {"item_id": item.get("id"), "output_index": index}
    events: list[Json] = []
    if item.get("type") == "message":
        events.append(_added(index, {**item, "status": "in_progress", "content": []}))
        for number, part in enumerate(item.get("content") or ()):
            at = {**where, "content_index": number}
            text = part.get("text") or ""
            events += [
                {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **at, "delta": text, "logprobs": part.get("logprobs") or []},
                {"type": "response.output_text.done", **at, "text": text, "logprobs": part.get("logprobs") or []},
                {"type": "response.content_part.done", **at, "part": part},
            ]
    elif item.get("type") in _INPUTS:
        field, kind = _INPUTS[item["type"]]
        text = item.get(field) or ""
        events += [
            _added(index, {**item, "status": "in_progress", field: ""}),
            {"type": f"response.{kind}.delta", **where, "delta": text},
            {"type": f"response.{kind}.done", **where, field: text},
        ]
    elif item.get("type") == "reasoning":
        events.append(_added(index, {**item, "summary": [], **({"content": []} if item.get("content") else {})}))
        for number, part in enumerate(dicts_in(item.get("summary"))):
            at, text = {**where, "summary_index": number}, part.get("text") or ""
            events += [
                {"type": "response.reasoning_summary_part.added", **at, "part": {**part, "text": ""}},
                {"type": "response.reasoning_summary_text.delta", **at, "delta": text},
                {"type": "response.reasoning_summary_text.done", **at, "text": text},
                {"type": "response.reasoning_summary_part.done", **at, "part": part},
            ]
        for number, part in enumerate(dicts_in(item.get("content"))):
            at, text = {**where, "content_index": number}, part.get("text") or ""
            events += [
                {"type": "response.reasoning_text.delta", **at, "delta": text},
                {"type": "response.reasoning_text.done", **at, "text": text},
            ]
    else:
        events.append(_added(index, item))
    return [*events, {"type": "response.output_item.done", "output_index": index, "item": item}]


def _added(index: int, item: Json) -> Json:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _reduced(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None  # clients may drop thoughts from later requests
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text") or "") for part in dicts_in(content))
        return [item.get("role"), content]
    # Clients may omit both: the endpoint needs only `call_id`.
    return {key: value for key, value in item.items() if key not in ("id", "status")}
