"""Anthropic's messages. It has no place for ids: they stand beside the events and the body, where asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from ....testing.scripted.player import (
    Conversation,
    Finish,
    Role,
    ScriptedAnswer,
    ScriptedMessage,
    ScriptedToolCall,
    canonical,
    joined,
)
from .base import Asked, BadRequest, Carrier, Chunk, Dialect, Identity, groups, opened, shown, text_of, whole_number

_STOP_REASONS: dict[Finish, str] = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}


class MessagesDialect(Dialect):
    """`POST /v1/messages`."""

    name = "anthropic"

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Read a request."""
        given = body.get("messages")
        if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
            raise BadRequest("messages must be a list of objects")
        messages = [ScriptedMessage("system", text_of(body["system"]))] if body.get("system") else []
        for message in given:
            messages.extend(_messages(message))
        schema = (body.get("output_config") or {}).get("format") or body.get("output_format") or {}
        return Asked(
            model=str(body.get("model", "")),
            conversation=Conversation(joined(messages), list(body.get("tools") or []), schema.get("schema")),
            stream=bool(body.get("stream")),
            max_tokens=whole_number(body, "max_tokens"),
            top_logprobs=whole_number(body, "top_logprobs") or 0,
            token_ids=bool(body.get("return_token_ids")),
            body=body,
        )

    def whole(self, asked: Asked, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""
        content: list[dict[str, Any]] = []
        if text := shown(answer):
            content.append({"type": "text", "text": text})
        for index in opened(answer):
            call = answer.calls[index]
            content.append(
                {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(shown(answer, index))}
            )
        body = _envelope(asked, answer, identity)
        body.update(content=content, stop_reason=_STOP_REASONS[answer.finish])
        body["usage"]["output_tokens"] = len(answer.steps)
        Carrier(asked, identity).add_to(body, answer)
        return body

    def stream(
        self, asked: Asked, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
    ) -> Iterator[Chunk]:
        """Write an answer as server-sent events."""
        carrier = Carrier(asked, identity)
        message = _envelope(asked, answer, identity)
        carrier.add_prompt(message, answer)
        yield carrier.chunk("message_start", {"type": "message_start", "message": message})
        block = -1
        for steps in groups(answer.steps, tokens_per_chunk):
            kind, visible = steps[0].kind, "".join(step.visible for step in steps)
            if kind == "hidden":
                carrier.hold(steps)
                continue
            if kind == "open" or (kind == "text" and block < 0):
                if block >= 0:
                    yield _stop(carrier, block)
                block += 1
                start: dict[str, Any] = {"type": "text", "text": ""}
                if kind == "open":
                    call = answer.calls[steps[0].call]
                    start = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
                    carrier.hold(steps)
                data = {"type": "content_block_start", "index": block, "content_block": start}
                yield carrier.chunk("content_block_start", data)
            if kind != "open":
                delta = (
                    {"type": "text_delta", "text": visible}
                    if kind == "text"
                    else {"type": "input_json_delta", "partial_json": visible}
                )
                data = {"type": "content_block_delta", "index": block, "delta": delta}
                yield carrier.chunk("content_block_delta", data, steps)
        if block >= 0:
            yield _stop(carrier, block)
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None},
            "usage": {"output_tokens": len(answer.steps)},
        }
        yield carrier.chunk("message_delta", end)
        yield carrier.chunk("message_stop", {"type": "message_stop"})

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """Write an error."""
        kinds = {429: "rate_limit_error", 529: "overloaded_error", 500: "api_error"}
        return {"type": "error", "error": {"type": kinds.get(status, kind), "message": message}}


def _messages(message: Mapping[str, Any]) -> Iterator[ScriptedMessage]:
    """Take a message apart: results of tools come inside messages of the user."""
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise BadRequest(f"no message has the role {message.get('role')!r}")
    content = message.get("content")
    if not isinstance(content, list):
        yield ScriptedMessage(role, text_of(content))
        return
    texts: list[str] = []
    calls: list[ScriptedToolCall] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(ScriptedToolCall(str(block.get("name", "")), canonical(block.get("input") or {})))
        elif kind == "tool_result":
            yield ScriptedMessage("tool", text_of(block.get("content")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(text_of([block]))
    if texts or calls:
        yield ScriptedMessage(role, "\n".join(texts), calls)


def _envelope(asked: Asked, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
    return {
        "id": f"msg_{identity.response_id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": 0},
    }


def _stop(carrier: Carrier, block: int) -> Chunk:
    return carrier.chunk("content_block_stop", {"type": "content_block_stop", "index": block})


def _input(arguments: str) -> Any:
    try:
        return from_json(arguments) if arguments else {}
    except ValueError:  # cut off by the token limit
        return {}
