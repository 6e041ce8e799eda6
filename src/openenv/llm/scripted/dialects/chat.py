"""OpenAI's chat completions, with ids where vLLM or SGLang put them."""

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
    Chunk,
    Dialect,
    Identity,
    event,
    groups,
    logprob_entries,
    opened,
    shown,
    text_of,
    whole_number,
)

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatDialect(Dialect):
    """`POST /v1/chat/completions`."""

    name = "openai_chat"

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Read a request."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRequest("messages must be a list of objects")
        if body.get("n") not in (None, 1):
            raise BadRequest("n must be 1: a script has one answer")
        tools = body.get("tools") or []
        schema = body.get("response_format") or {}
        options = body.get("stream_options") or {}
        return Asked(
            model=str(body.get("model", "")),
            conversation=Conversation(
                joined(_message(message) for message in messages),
                list(tools),
                (schema.get("json_schema") or {}).get("schema") if schema.get("type") == "json_schema" else None,
            ),
            stream=bool(body.get("stream")),
            max_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
            logprobs=bool(body.get("logprobs")),
            top_logprobs=whole_number(body, "top_logprobs") or 0,
            token_ids=bool(body.get("return_token_ids")),
            usage=bool(options.get("include_usage")),
            token_names_as_ids=bool(body.get("return_tokens_as_token_ids")),
            body=body,
        )

    def whole(self, asked: Asked, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""
        message: dict[str, Any] = {"role": "assistant", "content": shown(answer) or None}
        calls = [(answer.calls[index], shown(answer, index)) for index in opened(answer)]
        if calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call, arguments in calls
            ]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": answer.finish}
        choice["logprobs"] = {"content": logprob_entries(answer.steps, asked)} if asked.logprobs else None
        result = _envelope(asked, identity, "chat.completion", [choice])
        result["usage"] = _usage(answer)
        if asked.token_ids:
            _add_ids(result, choice, answer.steps, answer.prompt_ids, identity)
        return result

    def stream(
        self, asked: Asked, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
    ) -> Iterator[Chunk]:
        """Write an answer as server-sent events."""
        first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        opening = _envelope(asked, identity, "chat.completion.chunk", [first])
        if asked.token_ids:
            _add_ids(opening, first, (), answer.prompt_ids, identity)
        yield Chunk(event(opening))
        for steps in groups(answer.steps, tokens_per_chunk):
            choice: dict[str, Any] = {"index": 0, "delta": _delta(steps, answer), "finish_reason": None}
            if asked.logprobs:
                choice["logprobs"] = {"content": logprob_entries(steps, asked)}
            chunk = _envelope(asked, identity, "chat.completion.chunk", [choice])
            if asked.token_ids:
                _add_ids(chunk, choice, steps, None, identity)
            yield Chunk(event(chunk), steps)
        last = {"index": 0, "delta": {}, "finish_reason": answer.finish}
        yield Chunk(event(_envelope(asked, identity, "chat.completion.chunk", [last])))
        if asked.usage:
            usage = _envelope(asked, identity, "chat.completion.chunk", [])
            yield Chunk(event({**usage, "usage": _usage(answer)}))
        yield Chunk(b"data: [DONE]\n\n")

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """Write an error."""
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _message(message: Mapping[str, Any]) -> ScriptedMessage:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise BadRequest(f"no message has the role {message.get('role')!r}")
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(ScriptedToolCall(str(function.get("name", "")), canonical(function.get("arguments") or {})))
    return ScriptedMessage(role, text_of(message.get("content")), calls)


def _envelope(asked: Asked, identity: Identity, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": identity.response_id,
        "object": kind,
        "created": identity.created,
        "model": asked.model,
        "choices": choices,
        "system_fingerprint": "scripted",
    }


def _add_ids(
    body: dict[str, Any],
    choice: dict[str, Any],
    steps: Sequence[SampledToken],
    prompt: list[int] | None,
    identity: Identity,
) -> None:
    if identity.engine == "plain":
        return
    choice["token_ids"] = [step.token for step in steps]
    if prompt is not None:
        (body if identity.engine == "vllm" else choice)["prompt_token_ids"] = prompt


def _delta(steps: Sequence[SampledToken], answer: ScriptedAnswer) -> dict[str, Any]:
    first = steps[0]
    visible = "".join(step.visible for step in steps)
    if first.kind == "open":
        call = answer.calls[first.call]
        function = {"name": call.name, "arguments": ""}
        return {"tool_calls": [{"index": first.call, "id": call.call_id, "type": "function", "function": function}]}
    if first.kind == "arguments":
        return {"tool_calls": [{"index": first.call, "function": {"arguments": visible}}]}
    return {"content": visible} if visible else {}


def _usage(answer: ScriptedAnswer) -> dict[str, int]:
    prompt, completion = len(answer.prompt_ids), len(answer.steps)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
