"""The bridge from chat completions to endpoints with Anthropic messages; other dialects are chained through it.

A request without an exact translation is refused: leaving out a part would change its meaning.

    agent          request                                   endpoint
    responses  --> responses_over_chat.request --> request --> messages
    responses  <-- ResponseTranslator          <-- ChatTranslator <-- events          (`chained`)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...tasks.model_parameters import NEUTRAL_SAMPLING, token_limit
from ..encoding import STREAM_DONE, Json, dumps, event_bytes
from ..upstream_errors import ProviderConversionError
from .anthropic import AnthropicMessages
from .content import openai_chat_content_to_anthropic_blocks, openai_chat_image_to_anthropic
from .dialect import Bridge, StreamTranslator, as_dict, as_list, count_in, dicts_in

NATIVE_REQUEST = "_openenv_native_request"
"""The field of a chat request with the original Anthropic request."""
NATIVE_RESPONSE = "_openenv_native_response"
DEFAULT_LIMIT = 4096  # Anthropic requires `max_tokens`; chat completions do not
_UNSUPPORTED = ("response_format", "logit_bias", "audio", "modalities")
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p")
_FINISH = {"tool_use": "tool_calls", "max_tokens": "length"}
_KNOWN_STOPS = (None, "end_turn", "stop_sequence", "tool_use", "max_tokens")
_INPUT_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def anthropic_request(request: Json, model: str) -> Json:
    """Translate a chat request to Anthropic messages.

    Args:
        request: The chat request.
        model: The model's name at the endpoint.

    Raises:
        ProviderConversionError: A part of the request has no counterpart.
    """
    native = request.get(NATIVE_REQUEST)
    # The agent speaks Anthropic itself: send its own request, so that a translation and back cannot lose anything.
    if isinstance(native, dict):
        body = {key: value for key, value in native.items() if key != "_served_model"}
        limits = [token_limit(source.get("max_tokens")) or DEFAULT_LIMIT for source in (native, request)]
        if "temperature" in body and body.get("top_p") == 1:
            del body["top_p"]  # newer models take one of the two
        if body.get("top_k") == -1:
            del body["top_k"]
        return {**body, "model": model, "stream": False, "max_tokens": min(limits)}
    # A penalty at its neutral value has no effect, so it is dropped and the request accepted.
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
            # {"role": "tool", "tool_call_id": "c1"} -> a block {"type": "tool_result", "tool_use_id": "c1"} of the user
            result = {"tool_use_id": message.get("tool_call_id"), "content": _blocks(message.get("content"))}
            turn = {"role": "user", "content": [{"type": "tool_result", **result}]}
        elif role in ("user", "assistant"):
            if message.get("reasoning_content") or message.get("reasoning"):
                raise ProviderConversionError("Anthropic takes thoughts of earlier turns with its own signature only")
            blocks = _blocks(message.get("content")) if message.get("content") else []
            turn = {"role": role, "content": [*blocks, *map(_tool_use, dicts_in(message.get("tool_calls")))]}
        else:
            raise ProviderConversionError(f"Anthropic messages have no role {role!r}")
        if messages and messages[-1]["role"] == turn["role"]:  # the API requires alternating roles
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
    """Translate a message to a chat completion, with the original message in `NATIVE_RESPONSE`.

    Args:
        native: The message.
        native_passthrough: Whether the agent gets the original message, so that untranslatable parts are harmless.

    Raises:
        ProviderConversionError: A part of the message has no counterpart.
    """
    if not native_passthrough and native.get("stop_reason") not in _KNOWN_STOPS:
        raise ProviderConversionError(f"chat completions have no counterpart of stop_reason {native['stop_reason']!r}")
    blocks = dicts_in(native.get("content"))
    for block in blocks:
        if not native_passthrough and (
            block.get("type") not in ("text", "thinking", "tool_use") or block.get("citations")
        ):
            raise ProviderConversionError(f"chat completions have no counterpart of a block {block.get('type')!r}")
    # [thinking, text, tool_use, text] becomes one message: chat completions keep no order between the kinds.
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    message = {
        "role": "assistant",
        "content": "".join(block["text"] for block in blocks if block.get("type") == "text"),
        "reasoning_content": "".join(block["thinking"] for block in blocks if block.get("type") == "thinking") or None,
        "tool_calls": calls or None,
    }
    finish = _FINISH.get(str(native.get("stop_reason")), "stop")
    return {
        "id": native.get("id"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": native.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": _usage(native.get("usage")),
        NATIVE_RESPONSE: native,
    }


def _usage(counts: object) -> Json:
    # `input_tokens` excludes cached tokens, `prompt_tokens` includes them.
    prompt, sampled = sum(count_in(counts, name) for name in _INPUT_COUNTS), count_in(counts, "output_tokens")
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _call(block: Json) -> Json:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"), ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def replay_anthropic(native: Json) -> Iterator[str]:
    """Yield a whole message as the events of a stream."""
    for event in AnthropicMessages().stream({}, native):
        yield event.decode()


# The bridge for the proxy: agents of any dialect, through chat completions.


def request(body: Json) -> Json:
    """Translate a chat request to messages, with its `stream` flag."""
    return {**anthropic_request(body, str(body.get("model") or "")), "stream": body.get("stream") is True}


def _completion(native: Json) -> Json:
    return {key: value for key, value in anthropic_response(native).items() if key != NATIVE_RESPONSE}


class ChatTranslator:
    """Turns the events of one message into the chunks of a chat completion."""

    def __init__(self, body: Json) -> None:
        self._wants_usage = as_dict(body.get("stream_options")).get("include_usage") is True
        self._top: Json = {"object": "chat.completion.chunk", "created": int(time.time()), "model": body.get("model")}
        self._calls: dict[int, int] = {}  # index of the content block -> index of the tool call
        self._counts: Json = {}

    def chunks_of(self, event: Json) -> list[Json]:
        """Take the data of one event, and return its chunks."""
        # Block indexes count all blocks, tool call indexes only calls: text 0, tool_use 1 -> tool call 0.
        kind, index = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            message = as_dict(event.get("message"))
            self._top["id"] = message.get("id")
            self._counts.update(as_dict(message.get("usage")))  # the input; `message_delta` has the output
            return [self._chunk({"role": "assistant", "content": ""})]
        if kind == "content_block_start":
            return self._opened(index, as_dict(event.get("content_block")))
        if kind == "content_block_delta":
            delta = as_dict(event.get("delta"))
            arguments = {"index": self._calls.get(index, 0), "function": {"arguments": delta.get("partial_json")}}
            deltas: dict[str, Json] = {
                "text_delta": {"content": delta.get("text")},
                "thinking_delta": {"reasoning_content": delta.get("thinking")},
                "input_json_delta": {"tool_calls": [arguments]},
            }
            chosen = deltas.get(str(delta.get("type")))
            return [self._chunk(chosen)] if chosen is not None else []
        if kind == "message_delta":
            self._counts.update(as_dict(event.get("usage")))
            reason = as_dict(event.get("delta")).get("stop_reason")
            return [self._chunk({}, _FINISH.get(str(reason), "stop"))] if reason else []
        return [{"error": event.get("error")}] if kind == "error" else []

    def _opened(self, index: int, block: Json) -> list[Json]:
        if block.get("type") != "tool_use":
            return []
        number = self._calls[index] = len(self._calls)
        function = {"name": block.get("name"), "arguments": ""}
        call = {"index": number, "id": block.get("id"), "type": "function", "function": function}
        return [self._chunk({"tool_calls": [call]})]

    def _chunk(self, delta: Json, finish: str | None = None) -> Json:
        return {**self._top, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    def usage_chunk(self) -> Json:
        """Return the last chunk, with the usage."""
        return {**self._top, "choices": [], "usage": _usage(self._counts)}

    def feed(self, chunk: Json) -> bytes:
        """Take the data of one event, and return its chunks, encoded."""
        return b"".join(event_bytes(dumps(value)) for value in self.chunks_of(chunk))

    def end(self) -> bytes:
        """Return the usage, if the agent asked for it, and the end of the stream."""
        usage = event_bytes(dumps(self.usage_chunk())) if self._wants_usage else b""
        return usage + event_bytes(STREAM_DONE)

    def translate(self, response: Json) -> Json:
        """Return a whole message as a chat completion."""
        return _completion(response)


class ChainedTranslator:
    """Turns the events of one message into a third dialect, through chat completions."""

    def __init__(self, body: Json, last: StreamTranslator) -> None:
        self._first = ChatTranslator(body)
        self._last = last

    def feed(self, chunk: Json) -> bytes:
        """Take the data of one event, and return the agent's events."""
        return b"".join(map(self._last.feed, self._first.chunks_of(chunk)))

    def end(self) -> bytes:
        """Return the events that end the stream."""
        return self._last.feed(self._first.usage_chunk()) + self._last.end()

    def translate(self, response: Json) -> Json:
        """Return a whole message in the agent's dialect."""
        return self._last.translate(_completion(response))


CHAT_OVER_ANTHROPIC = Bridge(request, ChatTranslator)


def chained(over_chat: Callable[[Json], Json], translator: Callable[[Json], StreamTranslator]) -> Bridge:
    """Return a bridge to Anthropic messages, made of a bridge to chat completions and the one above."""
    return Bridge(lambda body: request(over_chat(body)), lambda body: ChainedTranslator(body, translator(body)))
