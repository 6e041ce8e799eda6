"""Chat completions over an endpoint that speaks Anthropic messages: what goes there, and what comes back.

A request that cannot be said in the other dialect is refused: a part that is left out would make another request of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from ...parameters import NEUTRAL_SAMPLING, token_limit
from ..dialects.anthropic import AnthropicMessages
from ..dialects.content import openai_chat_content_to_anthropic_blocks, openai_chat_image_to_anthropic
from ..dialects.dialect import as_dict, as_list, count_in, dicts_in
from ..encoding import Json
from .upstream_errors import UpstreamRequestError

NATIVE_REQUEST = "_openenv_native_request"
"""Where a chat request carries the Anthropic request that it was made of."""
NATIVE_RESPONSE = "_openenv_native_response"
DEFAULT_LIMIT = 4096
_UNSUPPORTED = ("response_format", "logit_bias", "audio", "modalities")
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p")
_FINISH = {"tool_use": "tool_calls", "max_tokens": "length"}
_KNOWN_STOPS = (None, "end_turn", "stop_sequence", "tool_use", "max_tokens")
_INPUT_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


class ProviderConversionError(UpstreamRequestError):
    """A request or an answer cannot be said in the other dialect."""


def anthropic_request(request: Json, model: str) -> Json:
    """Return a chat request as one for messages.

    Args:
        request: The chat request.
        model: The model's name at the endpoint.

    Raises:
        ProviderConversionError: something in it has no counterpart.
    """
    native = request.get(NATIVE_REQUEST)
    if isinstance(native, dict):
        body = {key: value for key, value in native.items() if key != "_served_model"}
        limits = [token_limit(source.get("max_tokens")) or DEFAULT_LIMIT for source in (native, request)]
        if "temperature" in body and body.get("top_p") == 1:
            del body["top_p"]  # newer models take one of the two
        if body.get("top_k") == -1:
            del body["top_k"]
        return {**body, "model": model, "stream": False, "max_tokens": min(limits)}
    lost = [name for name in _UNSUPPORTED if request.get(name)]
    lost += [name for name in _PENALTIES if request.get(name) not in (None, NEUTRAL_SAMPLING[name])]
    if lost:
        raise ProviderConversionError(f"an Anthropic endpoint has no counterpart of {', '.join(lost)}")
    limit = request.get("max_tokens", request.get("max_completion_tokens", DEFAULT_LIMIT))
    body = {"model": model, "max_tokens": limit, "stream": False}
    neutral = {"temperature": None, "top_p": 1, "top_k": -1}
    body |= {name: request[name] for name, off in neutral.items() if request.get(name) not in (None, off)}
    if "stop" in request:
        body["stop_sequences"] = [request["stop"]] if isinstance(request["stop"], str) else request["stop"]
    system, body["messages"] = _conversation(request)
    if system:
        body["system"] = system
    if request.get("tools"):
        body["tools"] = [_tool(tool) for tool in dicts_in(request["tools"])]
    choice = _tool_choice(request, has_tools="tools" in body)
    if choice is not None:
        body["tool_choice"] = choice
    return body


def _conversation(request: Json) -> tuple[list[Json], list[Json]]:
    system: list[Json] = []
    messages: list[Json] = []
    for message in dicts_in(request.get("messages")):
        role = message.get("role")
        if role in ("system", "developer"):
            if messages:
                raise ProviderConversionError("Anthropic messages have system texts at the beginning only")
            system += _blocks(message.get("content"))
            continue
        if role == "tool":
            result = {"tool_use_id": message.get("tool_call_id"), "content": _blocks(message.get("content"))}
            turn = {"role": "user", "content": [{"type": "tool_result", **result}]}
        elif role in ("user", "assistant"):
            if message.get("reasoning_content") or message.get("reasoning"):
                raise ProviderConversionError("Anthropic takes thoughts of earlier turns with its own signature only")
            blocks = _blocks(message.get("content")) if message.get("content") else []
            turn = {"role": role, "content": [*blocks, *map(_tool_use, dicts_in(message.get("tool_calls")))]}
        else:
            raise ProviderConversionError(f"Anthropic messages have no role {role!r}")
        if messages and messages[-1]["role"] == turn["role"]:  # roles take turns
            messages[-1]["content"] += turn["content"]
        else:
            messages.append(turn)
    return system, messages


def _blocks(content: Any) -> list[Json]:
    if content is None:
        return []
    for part in as_list(content):
        kind = "text" if isinstance(part, str) else as_dict(part).get("type")
        text = part if isinstance(part, str) else as_dict(part).get("text")
        is_text = kind == "text" and isinstance(text, str)
        if not is_text and not (kind == "image_url" and openai_chat_image_to_anthropic(part) is not None):
            raise ProviderConversionError(f"Anthropic messages have no counterpart of a part of type {kind!r}")
    if not isinstance(content, str | list):
        raise ProviderConversionError("the content of a message must be text or parts")
    return openai_chat_content_to_anthropic_blocks(content)


def _tool_use(call: Json) -> Json:
    function = as_dict(call.get("function"))
    arguments = function.get("arguments", {})
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ProviderConversionError("the arguments of a tool must be a JSON object")
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": parsed}


def _tool(tool: Json) -> Json:
    function = as_dict(tool.get("function"))
    if tool.get("type") != "function":
        raise ProviderConversionError(f"Anthropic messages have no counterpart of a tool of type {tool.get('type')!r}")
    schema = function.get("parameters", {"type": "object", "properties": {}})
    fields = {"name": function.get("name"), "description": function.get("description", ""), "input_schema": schema}
    return {**fields, "strict": function["strict"]} if "strict" in function else fields


def _tool_choice(request: Json, *, has_tools: bool) -> Json | None:
    choice = request.get("tool_choice")
    chosen: Json | None = None
    if choice in ("auto", "none", "required"):
        chosen = {"type": "any" if choice == "required" else choice}
    elif isinstance(choice, dict):
        chosen = {"type": "tool", "name": as_dict(choice.get("function")).get("name")}
    if request.get("parallel_tool_calls") is False and has_tools:
        chosen = {**(chosen or {"type": "auto"}), "disable_parallel_tool_use": True}
    return chosen


def anthropic_response(native: Json, *, native_passthrough: bool = False) -> Json:
    """Return a message as a chat completion, with the message itself in it.

    Args:
        native: The message.
        native_passthrough: Whether the agent gets the message itself, so that nothing can be lost.

    Raises:
        ProviderConversionError: something in it has no counterpart.
    """
    if not native_passthrough and native.get("stop_reason") not in _KNOWN_STOPS:
        raise ProviderConversionError(f"chat completions have no counterpart of stop_reason {native['stop_reason']!r}")
    blocks = dicts_in(native.get("content"))
    for block in blocks:
        if not native_passthrough and (
            block.get("type") not in ("text", "thinking", "tool_use") or block.get("citations")
        ):
            raise ProviderConversionError(f"chat completions have no counterpart of a block {block.get('type')!r}")
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    message = {
        "role": "assistant",
        "content": "".join(block["text"] for block in blocks if block.get("type") == "text"),
        "reasoning_content": "".join(block["thinking"] for block in blocks if block.get("type") == "thinking") or None,
        "tool_calls": calls or None,
    }
    finish = _FINISH.get(str(native.get("stop_reason")), "stop")
    usage = native.get("usage")
    prompt, sampled = sum(count_in(usage, name) for name in _INPUT_COUNTS), count_in(usage, "output_tokens")
    return {
        "id": native.get("id"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": native.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        NATIVE_RESPONSE: native,
    }


def _call(block: Json) -> Json:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"), ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def replay_anthropic(native: Json) -> Iterator[str]:
    """Yield a whole message as the events of a stream."""
    for event in AnthropicMessages().stream({}, native):
        yield event.decode()
