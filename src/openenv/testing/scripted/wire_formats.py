"""The three wire formats of scripted models: read a request, write a reply as one body or as a stream of events.

Pure: bytes and values in, bytes and values out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic_core import from_json, to_json

from . import vocabulary
from .player import (
    Role,
    SampledToken,
    ScriptedAnswer,
    ScriptedConversation,
    ScriptedMessage,
    ScriptedToolCall,
    canonical,
    joined,
)

EngineName = Literal["vllm", "sglang", "plain"]
"""The place of token IDs in replies: as in vLLM, as in SGLang, or none."""
Json = dict[str, Any]


class UnreadableRequest(ValueError):
    """The request's body does not follow the wire format."""


@dataclass(slots=True)
class Chunk:
    """One chunk of a stream with its tokens."""

    data: bytes
    steps: Sequence[SampledToken] = ()


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A parsed request."""

    model: str
    conversation: ScriptedConversation
    stream: bool
    top_logprobs: int
    wants_token_ids: bool
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: bool = False
    usage: bool = False
    token_names_as_ids: bool = False


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """A reply to write: the answer to a request, with its ID, time and model."""

    request: ModelRequest
    answer: ScriptedAnswer
    response_id: str
    created: int
    engine: EngineName

    @property
    def has_token_ids(self) -> bool:
        """Whether the reply contains token IDs."""
        return self.request.wants_token_ids and self.engine != "plain"

    @property
    def prompt_tokens(self) -> int:
        """The size of the prompt."""
        return len(self.answer.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """The size of the answer."""
        return len(self.answer.steps)

    def text(self) -> str:
        """Return the part of the answer's text within the token limit."""
        return "".join(step.visible for step in self.answer.steps if step.kind == "text")

    def calls(self) -> Iterator[tuple[int, ScriptedToolCall, str]]:
        """Yield the calls that start within the token limit: number, call, and possibly incomplete arguments."""
        for index in [step.call for step in self.answer.steps if step.kind == "open"]:
            arguments = [step.visible for step in self.answer.steps if step.kind == "arguments" and step.call == index]
            yield index, self.answer.calls[index], "".join(arguments)

    def logprob_entries(self, steps: Iterable[SampledToken]) -> list[Json]:
        """Return log-probabilities in the format of `logprobs.content` of OpenAI's chat completions."""
        return [
            {
                **self._entry(step.token, step.logprob),
                "top_logprobs": [
                    self._entry(other.token, other.logprob)
                    for other in vocabulary.alternatives(step.token, step.logprob, self.request.top_logprobs)
                ],
            }
            for step in steps
        ]

    def _entry(self, token: int, chance: float) -> Json:
        data = vocabulary.bytes_of(token)
        # Engines replace an incomplete character too.
        text = f"token_id:{token}" if self.request.token_names_as_ids else data.decode("utf-8", "replace")
        return {"token": text, "logprob": chance, "bytes": list(data)}


class WireFormat(ABC):
    """One wire format."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request.

        Raises:
            UnreadableRequest: The request is invalid.
        """

    @abstractmethod
    def whole(self, reply: ScriptedReply) -> Json:
        """Return a reply as one body."""

    @abstractmethod
    def stream(self, reply: ScriptedReply, *, tokens_per_chunk: int) -> Iterator[Chunk]:
        """Write a reply as server-sent events."""

    def error(self, status: int, message: str, kind: str) -> Json:
        """Write an error."""
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _request(
    body: Mapping[str, Any], messages: Iterable[ScriptedMessage], schema: Json | None, **more: Any
) -> ModelRequest:
    """Return a request with the fields that have the same name in all formats."""
    return ModelRequest(
        model=str(body.get("model", "")),
        conversation=ScriptedConversation(joined(messages), list(body.get("tools") or []), schema),
        stream=bool(body.get("stream")),
        top_logprobs=_whole_number(body, "top_logprobs") or 0,
        wants_token_ids=bool(body.get("return_token_ids")),
        seed=_whole_number(body, "seed"),
        **more,
    )


def _text_of(content: Any) -> str:
    """Return the text of a content field: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            text = part.get("text")
            texts.append(text if isinstance(text, str) else f"[{part.get('type', 'part')}]")
    return "\n".join(texts)


def _objects(value: Any, problem: str) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UnreadableRequest(problem)
    return value


def _role(message: Mapping[str, Any], roles: Mapping[str, Role]) -> Role:
    role = roles.get(str(message.get("role")))
    if role is None:
        raise UnreadableRequest(f"no message has the role {message.get('role')!r}")
    return role


def _whole_number(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first number in these fields."""
    values = (body.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _event(data: Any, name: str | None = None) -> bytes:
    """Write one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


def _groups(steps: Sequence[SampledToken], size: int) -> Iterator[Sequence[SampledToken]]:
    """Split an answer into runs of tokens, one per chunk. A run never contains text and a call, or two calls."""
    begin = 0
    while begin < len(steps):
        place = (steps[begin].kind, steps[begin].call)
        end = begin + 1
        while end < len(steps) and end - begin < size and (steps[end].kind, steps[end].call) == place:
            end += 1
        yield steps[begin:end]
        begin = end


# ---- OpenAI chat completions, with the token IDs of vLLM or SGLang ----


_CHAT_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatFormat(WireFormat):
    """`POST /v1/chat/completions`."""

    name = "openai_chat"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        messages = _objects(body.get("messages"), "messages must be a list of objects")
        if body.get("n") not in (None, 1):
            raise UnreadableRequest("n must be 1: a script has one answer")
        schema = body.get("response_format") or {}
        return _request(
            body,
            (_chat_message(message) for message in messages),
            (schema.get("json_schema") or {}).get("schema") if schema.get("type") == "json_schema" else None,
            max_tokens=_whole_number(body, "max_completion_tokens", "max_tokens"),
            logprobs=bool(body.get("logprobs")),
            usage=bool((body.get("stream_options") or {}).get("include_usage")),
            token_names_as_ids=bool(body.get("return_tokens_as_token_ids")),
        )

    def whole(self, reply: ScriptedReply) -> Json:
        message: Json = {"role": "assistant", "content": reply.text() or None}
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for _, call, arguments in reply.calls()
        ]
        if calls:
            message["tool_calls"] = calls
        steps = reply.answer.steps
        choice: Json = {"index": 0, "message": message, "finish_reason": reply.answer.finish}
        choice["logprobs"] = {"content": reply.logprob_entries(steps)} if reply.request.logprobs else None
        body = _chat_body(reply, choice, kind="chat.completion")
        body["usage"] = _chat_usage(reply)
        _add_chat_ids(body, choice, steps, reply, with_prompt=True)
        return body

    def stream(self, reply: ScriptedReply, *, tokens_per_chunk: int) -> Iterator[Chunk]:
        first: Json = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        opening = _chat_body(reply, first)
        _add_chat_ids(opening, first, (), reply, with_prompt=True)
        yield Chunk(_event(opening))
        for steps in _groups(reply.answer.steps, tokens_per_chunk):
            choice: Json = {"index": 0, "delta": _chat_delta(steps, reply.answer), "finish_reason": None}
            if reply.request.logprobs:
                choice["logprobs"] = {"content": reply.logprob_entries(steps)}
            body = _chat_body(reply, choice)
            _add_chat_ids(body, choice, steps, reply)
            yield Chunk(_event(body), steps)
        yield Chunk(_event(_chat_body(reply, {"index": 0, "delta": {}, "finish_reason": reply.answer.finish})))
        if reply.request.usage:
            yield Chunk(_event({**_chat_body(reply), "usage": _chat_usage(reply)}))
        yield Chunk(b"data: [DONE]\n\n")


def _chat_message(message: Mapping[str, Any]) -> ScriptedMessage:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [
        ScriptedToolCall(str(function.get("name", "")), canonical(function.get("arguments") or {}))
        for function in functions
    ]
    return ScriptedMessage(_role(message, _CHAT_ROLES), _text_of(message.get("content")), calls)


def _chat_body(reply: ScriptedReply, *choices: Json, kind: str = "chat.completion.chunk") -> Json:
    return {
        "id": reply.response_id,
        "object": kind,
        "created": reply.created,
        "model": reply.request.model,
        "choices": list(choices),
        "system_fingerprint": "scripted",
    }


def _add_chat_ids(
    body: Json, choice: Json, steps: Sequence[SampledToken], reply: ScriptedReply, *, with_prompt: bool = False
) -> None:
    if reply.has_token_ids:
        choice["token_ids"] = [step.token for step in steps]
        if with_prompt:
            (body if reply.engine == "vllm" else choice)["prompt_token_ids"] = reply.answer.prompt_ids


def _chat_delta(steps: Sequence[SampledToken], answer: ScriptedAnswer) -> Json:
    first = steps[0]
    visible = "".join(step.visible for step in steps)
    if first.kind == "open":
        call = answer.calls[first.call]
        function = {"name": call.name, "arguments": ""}
        return {"tool_calls": [{"index": first.call, "id": call.call_id, "type": "function", "function": function}]}
    if first.kind == "arguments":
        return {"tool_calls": [{"index": first.call, "function": {"arguments": visible}}]}
    return {"content": visible} if visible else {}


def _chat_usage(reply: ScriptedReply) -> Json:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# ---- shared by messages and responses: replies with items, and without a place for token IDs ----


class _ItemStream(ABC):
    """The events of one reply. At most one item is open at a time: a text or a tool call.

    Two extra fields of an event list the IDs and log-probabilities of its tokens and of the invisible tokens before.
    """

    def __init__(self, reply: ScriptedReply) -> None:
        self._reply = reply
        self._item = -1  # the number of the open item
        self._waiting: list[SampledToken] = []

    def chunks(self, tokens_per_chunk: int) -> Iterator[Chunk]:
        yield from self._start()
        for steps in _groups(self._reply.answer.steps, tokens_per_chunk):
            kind = steps[0].kind
            if kind == "hidden":
                self._waiting.extend(steps)
                continue
            if kind == "open" or self._item < 0:
                if self._item >= 0:
                    yield from self._end_item()
                self._item += 1
                if kind == "open":
                    self._waiting.extend(steps)
                yield from self._start_item(steps[0])
            if kind != "open":
                yield self._delta(steps, "".join(step.visible for step in steps))
        if self._item >= 0:
            yield from self._end_item()
        yield from self._end()

    def _chunk(self, kind: str, data: Json, steps: Sequence[SampledToken] = ()) -> Chunk:
        carried = [*self._waiting, *steps]
        self._waiting.clear()
        body = {"type": kind, **data}
        if self._reply.has_token_ids and carried:
            body["token_ids"] = [step.token for step in carried]
            body["logprobs"] = self._reply.logprob_entries(carried)
        return Chunk(_event(body, kind), carried)

    @abstractmethod
    def _start(self) -> Iterator[Chunk]: ...

    @abstractmethod
    def _start_item(self, first: SampledToken) -> Iterator[Chunk]: ...

    @abstractmethod
    def _delta(self, steps: Sequence[SampledToken], visible: str) -> Chunk: ...

    @abstractmethod
    def _end_item(self) -> Iterator[Chunk]: ...

    @abstractmethod
    def _end(self) -> Iterator[Chunk]: ...


def _add_prompt(body: Json, reply: ScriptedReply) -> Json:
    if reply.has_token_ids:
        body["prompt_token_ids"] = reply.answer.prompt_ids
    return body


def _add_tokens(body: Json, reply: ScriptedReply) -> Json:
    if reply.has_token_ids:
        body["token_ids"] = [step.token for step in reply.answer.steps]
        body["logprobs"] = reply.logprob_entries(reply.answer.steps)
    return _add_prompt(body, reply)


# ---- Anthropic messages ----


_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_MESSAGE_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}


class MessagesFormat(WireFormat):
    """`POST /v1/messages`."""

    name = "anthropic"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        messages = [ScriptedMessage("system", _text_of(body["system"]))] if body.get("system") else []
        for message in _objects(body.get("messages"), "messages must be a list of objects"):
            messages.extend(_messages(message))
        schema = (body.get("output_config") or {}).get("format") or body.get("output_format") or {}
        return _request(body, messages, schema.get("schema"), max_tokens=_whole_number(body, "max_tokens"))

    def whole(self, reply: ScriptedReply) -> Json:
        body = _message_body(reply)
        if text := reply.text():
            body["content"].append({"type": "text", "text": text})
        body["content"] += [_tool_use(call, _input(arguments)) for _, call, arguments in reply.calls()]
        body["stop_reason"] = _STOP_REASONS[reply.answer.finish]
        body["usage"]["output_tokens"] = reply.completion_tokens
        return _add_tokens(body, reply)

    def stream(self, reply: ScriptedReply, *, tokens_per_chunk: int) -> Iterator[Chunk]:
        return _MessageStream(reply).chunks(tokens_per_chunk)

    def error(self, status: int, message: str, kind: str) -> Json:
        kinds = {429: "rate_limit_error", 529: "overloaded_error", 500: "api_error"}
        return {"type": "error", "error": {"type": kinds.get(status, kind), "message": message}}


class _MessageStream(_ItemStream):
    """The events of a message; its items are content blocks."""

    def _start(self) -> Iterator[Chunk]:
        yield self._chunk("message_start", {"message": _add_prompt(_message_body(self._reply), self._reply)})

    def _start_item(self, first: SampledToken) -> Iterator[Chunk]:
        text = {"type": "text", "text": ""}
        block = _tool_use(self._reply.answer.calls[first.call], {}) if first.kind == "open" else text
        yield self._chunk("content_block_start", {"index": self._item, "content_block": block})

    def _delta(self, steps: Sequence[SampledToken], visible: str) -> Chunk:
        kind, field = ("text_delta", "text") if steps[0].kind == "text" else ("input_json_delta", "partial_json")
        return self._chunk("content_block_delta", {"index": self._item, "delta": {"type": kind, field: visible}}, steps)

    def _end_item(self) -> Iterator[Chunk]:
        yield self._chunk("content_block_stop", {"index": self._item})

    def _end(self) -> Iterator[Chunk]:
        delta = {"stop_reason": _STOP_REASONS[self._reply.answer.finish], "stop_sequence": None}
        usage = {"output_tokens": self._reply.completion_tokens}
        yield self._chunk("message_delta", {"delta": delta, "usage": usage})
        yield self._chunk("message_stop", {})


def _messages(message: Mapping[str, Any]) -> Iterator[ScriptedMessage]:
    """Split a message, because user messages contain tool results."""
    role = _role(message, _MESSAGE_ROLES)
    content = message.get("content")
    if not isinstance(content, list):
        yield ScriptedMessage(role, _text_of(content))
        return
    texts: list[str] = []
    calls: list[ScriptedToolCall] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(ScriptedToolCall(str(block.get("name", "")), canonical(block.get("input") or {})))
        elif kind == "tool_result":
            yield ScriptedMessage("tool", _text_of(block.get("content")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(_text_of([block]))
    if texts or calls:
        yield ScriptedMessage(role, "\n".join(texts), calls)


def _message_body(reply: ScriptedReply) -> Json:
    return {
        "id": f"msg_{reply.response_id}",
        "type": "message",
        "role": "assistant",
        "model": reply.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": 0},
    }


def _tool_use(call: ScriptedToolCall, arguments: Any) -> Json:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _input(arguments: str) -> Any:
    try:
        return from_json(arguments) if arguments else {}
    except ValueError:  # cut off by the token limit
        return {}


# ---- OpenAI responses ----


_RESPONSE_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


class ResponsesFormat(WireFormat):
    """`POST /v1/responses`, without state on the server: the whole conversation is in each request."""

    name = "openai_responses"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        items = body.get("input")
        if isinstance(items, str):
            items = [{"type": "message", "role": "user", "content": items}]
        items = _objects(items, "input must be a text or a list of objects")
        if body.get("previous_response_id"):
            raise UnreadableRequest("previous_response_id: no conversation is kept here; send all of its items")
        messages = [ScriptedMessage("system", body["instructions"])] if body.get("instructions") else []
        messages.extend(message for item in items if (message := _response_message(item)) is not None)
        schema = (body.get("text") or {}).get("format") or {}
        return _request(
            body,
            messages,
            schema.get("schema"),
            max_tokens=_whole_number(body, "max_output_tokens"),
            logprobs="message.output_text.logprobs" in (body.get("include") or []),
        )

    def whole(self, reply: ScriptedReply) -> Json:
        is_cut = reply.answer.finish == "length"
        body = _response_body(reply, "incomplete" if is_cut else "completed")
        body["output"] = _output(reply, body["status"])
        body["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        body["usage"] = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
        return _add_tokens(body, reply)

    def stream(self, reply: ScriptedReply, *, tokens_per_chunk: int) -> Iterator[Chunk]:
        return _ResponseStream(reply, self.whole(reply)).chunks(tokens_per_chunk)

    def error(self, status: int, message: str, kind: str) -> Json:
        return {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}


class _ResponseStream(_ItemStream):
    """The numbered events of a response; its items are the items of the output."""

    def __init__(self, reply: ScriptedReply, whole: Json) -> None:
        super().__init__(reply)
        self._whole = whole
        self._number = -1

    def _numbered(self, kind: str, *, steps: Sequence[SampledToken] = (), **data: Any) -> Chunk:
        self._number += 1
        return self._chunk(kind, {"sequence_number": self._number, **data}, steps)

    def _start(self) -> Iterator[Chunk]:
        begun = _response_body(self._reply, "in_progress")
        yield self._numbered("response.created", response=_add_prompt(dict(begun), self._reply))
        yield self._numbered("response.in_progress", response=begun)

    def _start_item(self, first: SampledToken) -> Iterator[Chunk]:
        item = self._whole["output"][self._item]
        empty: Json = {"content": []} if item["type"] == "message" else {_argument_field(item): ""}
        begun = {**item, **empty, "status": "in_progress"}
        yield self._numbered("response.output_item.added", output_index=self._item, item=begun)
        if item["type"] == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._numbered("response.content_part.added", **self._place(item), content_index=0, part=part)

    def _delta(self, steps: Sequence[SampledToken], visible: str) -> Chunk:
        item = self._whole["output"][self._item]
        if item["type"] != "message":
            return self._numbered(f"{_argument_event(item)}.delta", steps=steps, **self._place(item), delta=visible)
        logprobs = self._reply.logprob_entries(steps) if self._reply.request.logprobs else []
        data = {**self._place(item), "content_index": 0, "delta": visible, "logprobs": logprobs}
        return self._numbered("response.output_text.delta", steps=steps, **data)

    def _end_item(self) -> Iterator[Chunk]:
        item = self._whole["output"][self._item]
        place = self._place(item)
        if item["type"] == "message":
            part = item["content"][0]
            data = {**place, "content_index": 0, "text": part["text"], "logprobs": part.get("logprobs", [])}
            yield self._numbered("response.output_text.done", **data)
            yield self._numbered("response.content_part.done", **place, content_index=0, part=part)
        else:
            field = _argument_field(item)
            yield self._numbered(f"{_argument_event(item)}.done", **place, **{field: item[field]})
        yield self._numbered("response.output_item.done", output_index=self._item, item=item)

    def _end(self) -> Iterator[Chunk]:
        yield self._numbered(f"response.{self._whole['status']}", response=self._whole)

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": self._item}


def _argument_field(item: Mapping[str, Any]) -> str:
    return "input" if item["type"] == "custom_tool_call" else "arguments"


def _argument_event(item: Mapping[str, Any]) -> str:
    is_free_form = item["type"] == "custom_tool_call"
    return "response.custom_tool_call_input" if is_free_form else "response.function_call_arguments"


def _response_message(item: Mapping[str, Any]) -> ScriptedMessage | None:
    kind = item.get("type", "message")
    if kind in ("function_call", "custom_tool_call"):
        arguments = str(item.get("input", "")) if kind == "custom_tool_call" else canonical(item.get("arguments") or {})
        return ScriptedMessage("assistant", "", [ScriptedToolCall(str(item.get("name", "")), arguments)])
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        return ScriptedMessage("tool", _text_of(output) if isinstance(output, str | list) else canonical(output))
    if kind == "message":
        return ScriptedMessage(_role(item, _RESPONSE_ROLES), _text_of(item.get("content")))
    return None  # reasoning and other items are not part of a script


def _output(reply: ScriptedReply, status: str) -> list[Json]:
    items: list[Json] = []
    if text := reply.text():
        part: Json = {"type": "output_text", "text": text, "annotations": []}
        if reply.request.logprobs:
            part["logprobs"] = reply.logprob_entries(step for step in reply.answer.steps if step.kind == "text")
        message_id = f"msg_{reply.response_id}"
        items.append({"type": "message", "id": message_id, "role": "assistant", "status": status, "content": [part]})
    for index, call, arguments in reply.calls():
        kind = "custom_tool_call" if call.free_form else "function_call"
        item: Json = {"type": kind, "id": f"fc_{reply.response_id}_{index}", "call_id": call.call_id}
        item.update({"name": call.name, "status": status})
        item[_argument_field(item)] = arguments
        items.append(item)
    return items


def _response_body(reply: ScriptedReply, status: str) -> Json:
    return {
        "id": f"resp_{reply.response_id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "model": reply.request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
        "metadata": {"scripted": "true"},
    }
