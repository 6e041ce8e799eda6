"""OpenAI's responses. Ids stand beside the events and the body, where asked for: the dialect has no place for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....testing.scripted.player import (
    Conversation,
    Role,
    SampledToken,
    ScriptedAnswer,
    ScriptedMessage,
    ScriptedToolCall,
    canonical,
    joined,
)
from .base import (
    Asked,
    BadRequest,
    Carrier,
    Chunk,
    Dialect,
    Identity,
    groups,
    logprob_entries,
    opened,
    shown,
    text_of,
    whole_number,
)

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")


class ResponsesDialect(Dialect):
    """`POST /v1/responses`, without state on the server: the whole conversation is in each request."""

    name = "openai_responses"

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Read a request."""
        given = body.get("input")
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
            raise BadRequest("input must be a text or a list of objects")
        if body.get("previous_response_id"):
            raise BadRequest("previous_response_id: no conversation is kept here; send all of its items")
        messages = [ScriptedMessage("system", body["instructions"])] if body.get("instructions") else []
        messages.extend(found for item in given if (found := _message(item)) is not None)
        schema = (body.get("text") or {}).get("format") or {}
        include = body.get("include") or []
        return Asked(
            model=str(body.get("model", "")),
            conversation=Conversation(joined(messages), list(body.get("tools") or []), schema.get("schema")),
            stream=bool(body.get("stream")),
            max_tokens=whole_number(body, "max_output_tokens"),
            logprobs="message.output_text.logprobs" in include,
            top_logprobs=whole_number(body, "top_logprobs") or 0,
            token_ids=bool(body.get("return_token_ids")),
            body=body,
        )

    def whole(self, asked: Asked, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""
        cut = answer.finish == "length"
        body = _envelope(asked, identity, "incomplete" if cut else "completed")
        body["output"] = _output(asked, answer, identity)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        prompt, completion = len(answer.prompt_ids), len(answer.steps)
        body["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        Carrier(asked, identity).add_to(body, answer)
        return body

    def stream(
        self, asked: Asked, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
    ) -> Iterator[Chunk]:
        """Write an answer as server-sent events."""
        return _Stream(self, asked, answer, identity).chunks(tokens_per_chunk)

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """Write an error."""
        return {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}


class _Stream:
    """The events of one reply, numbered."""

    def __init__(self, dialect: ResponsesDialect, asked: Asked, answer: ScriptedAnswer, identity: Identity) -> None:
        self._asked, self._answer, self._identity = asked, answer, identity
        self._carrier = Carrier(asked, identity)
        self._whole = dialect.whole(asked, answer, identity)
        self._number = 0
        self._output = -1

    def chunks(self, tokens_per_chunk: int) -> Iterator[Chunk]:
        begun = _envelope(self._asked, self._identity, "in_progress")
        self._carrier.add_prompt(begun, self._answer)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=_envelope(self._asked, self._identity, "in_progress"))
        for steps in groups(self._answer.steps, tokens_per_chunk):
            kind = steps[0].kind
            if kind == "hidden":
                self._carrier.hold(steps)
            elif kind == "open":
                yield from self._end_item()
                self._carrier.hold(steps)
                yield from self._begin_item()
            else:
                if self._output < 0:
                    yield from self._begin_item()
                yield self._delta(steps)
        yield from self._end_item()
        last = "response.incomplete" if self._answer.finish == "length" else "response.completed"
        yield self._event(last, response=self._whole)

    def _event(self, kind: str, *, steps: Sequence[SampledToken] = (), **data: Any) -> Chunk:
        self._number += 1
        return self._carrier.chunk(kind, {"type": kind, "sequence_number": self._number - 1, **data}, steps)

    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self._whole["output"][self._output]
        return item

    def _begin_item(self) -> Iterator[Chunk]:
        self._output += 1
        item = self._item()
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {_argument_field(item): ""}
        begun = {**item, **empty, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self._output, item=begun)
        if item["type"] == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _delta(self, steps: Sequence[SampledToken]) -> Chunk:
        visible = "".join(step.visible for step in steps)
        item = self._item()
        if item["type"] != "message":
            return self._event(f"{_argument_event(item)}.delta", steps=steps, **self._place(), delta=visible)
        more = {"logprobs": logprob_entries(steps, self._asked) if self._asked.logprobs else []}
        place = self._place()
        return self._event("response.output_text.delta", steps=steps, **place, content_index=0, delta=visible, **more)

    def _end_item(self) -> Iterator[Chunk]:
        if self._output < 0:
            return
        item, place = self._item(), self._place()
        if item["type"] == "message":
            part = item["content"][0]
            more = {"content_index": 0, "text": part["text"], "logprobs": part.get("logprobs", [])}
            yield self._event("response.output_text.done", **place, **more)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        else:
            field = _argument_field(item)
            yield self._event(f"{_argument_event(item)}.done", **place, **{field: item[field]})
        yield self._event("response.output_item.done", output_index=self._output, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item()["id"], "output_index": self._output}


def _argument_field(item: Mapping[str, Any]) -> str:
    return "input" if item["type"] == "custom_tool_call" else "arguments"


def _argument_event(item: Mapping[str, Any]) -> str:
    free_form = item["type"] == "custom_tool_call"
    return "response.custom_tool_call_input" if free_form else "response.function_call_arguments"


def _message(item: Mapping[str, Any]) -> ScriptedMessage | None:
    kind = item.get("type", "message")
    if kind in _CALLS:
        arguments = str(item.get("input", "")) if kind == "custom_tool_call" else canonical(item.get("arguments") or {})
        return ScriptedMessage("assistant", "", [ScriptedToolCall(str(item.get("name", "")), arguments)])
    if kind in _RESULTS:
        output = item.get("output")
        return ScriptedMessage("tool", text_of(output) if isinstance(output, str | list) else canonical(output))
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise BadRequest(f"no message has the role {item.get('role')!r}")
        return ScriptedMessage(role, text_of(item.get("content")))
    return None  # reasoning and the like is nothing that a script has said


def _output(asked: Asked, answer: ScriptedAnswer, identity: Identity) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if answer.finish == "length" else "completed"
    if text := shown(answer):
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if asked.logprobs:
            part["logprobs"] = logprob_entries([step for step in answer.steps if step.kind == "text"], asked)
        message_id = f"msg_{identity.response_id}"
        items.append({"type": "message", "id": message_id, "role": "assistant", "status": status, "content": [part]})
    for index in opened(answer):
        call = answer.calls[index]
        kind, field = ("custom_tool_call", "input") if call.free_form else ("function_call", "arguments")
        items.append(
            {
                "type": kind,
                "id": f"fc_{identity.response_id}_{index}",
                "call_id": call.call_id,
                "name": call.name,
                "status": status,
                field: shown(answer, index),
            }
        )
    return items


def _envelope(asked: Asked, identity: Identity, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{identity.response_id}",
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
        "metadata": {"scripted": "true"},
    }
