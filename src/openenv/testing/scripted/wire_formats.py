"""The three wire formats of scripted models: read a request, write an answer as one body or as a stream of events.

Pure: bytes and values in, bytes and values out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic_core import from_json, to_json

from . import vocabulary
from .player import (
    Conversation,
    Finish,
    Role,
    SampledToken,
    ScriptedAnswer,
    ScriptedMessage,
    ScriptedToolCall,
    canonical,
    joined,
)

EngineName = Literal["vllm", "sglang", "plain"]
"""Where replies have token ids: as vLLM writes them, as SGLang writes them, or nowhere."""


class BadRequest(ValueError):
    """The request's body does not follow the wire format."""


@dataclass(slots=True)
class Chunk:
    """One piece of a stream, and the tokens that it carries."""

    data: bytes
    steps: Sequence[SampledToken] = ()


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request, read from its wire format."""

    model: str
    conversation: Conversation
    stream: bool = False
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    usage: bool = True
    token_names_as_ids: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a reply: its id, time and model server."""

    response_id: str
    created: int
    engine: EngineName = "vllm"


class WireFormat(ABC):
    """One wire format."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request.

        Raises:
            BadRequest: It cannot be understood.
        """

    @abstractmethod
    def whole(self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""

    @abstractmethod
    def stream(
        self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
    ) -> Iterator[Chunk]:
        """Write an answer as server-sent events."""

    @abstractmethod
    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """Write an error."""


def groups(steps: Sequence[SampledToken], size: int) -> Iterator[Sequence[SampledToken]]:
    """Cut an answer into runs of tokens that go out together; a run never spans text and a call, or two calls."""
    begin = 0
    while begin < len(steps):
        end = begin + 1
        while end < len(steps) and end - begin < size and _alike(steps[begin], steps[end]):
            end += 1
        yield steps[begin:end]
        begin = end


def _alike(one: SampledToken, other: SampledToken) -> bool:
    return one.kind == other.kind and one.call == other.call


class Carrier:
    """Adds ids and log-probabilities to the events of wire formats that have no place for them.

    An event carries its own tokens and those before it that show nothing, as two lists of the same length.
    """

    def __init__(self, request: ModelRequest, identity: Identity) -> None:
        self._request = request
        self._wanted = request.token_ids and identity.engine != "plain"
        self._waiting: list[SampledToken] = []

    def hold(self, steps: Sequence[SampledToken]) -> None:
        """Keep tokens for the next event."""
        self._waiting.extend(steps)

    def chunk(self, name: str, data: dict[str, Any], steps: Sequence[SampledToken] = ()) -> Chunk:
        """Write an event with all tokens that wait, and its own."""
        carried = [*self._waiting, *steps]
        self._waiting.clear()
        if self._wanted and carried:
            data["token_ids"] = [step.token for step in carried]
            data["logprobs"] = logprob_entries(carried, self._request)
        return Chunk(event(data, name), carried)

    def add_to(self, body: dict[str, Any], answer: ScriptedAnswer) -> None:
        """Put prompt and answer into a whole reply."""
        if self._wanted:
            body["prompt_token_ids"] = answer.prompt_ids
            body["token_ids"] = answer.token_ids
            body["logprobs"] = logprob_entries(answer.steps, self._request)

    def add_prompt(self, body: dict[str, Any], answer: ScriptedAnswer) -> None:
        """Put the prompt into the first event."""
        if self._wanted:
            body["prompt_token_ids"] = answer.prompt_ids


def event(data: Any, name: str | None = None) -> bytes:
    """Write one server-sent event."""
    body = to_json(data)
    if name is None:
        return b"data: " + body + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def token_text(token: int) -> str:
    """Return a token's own text; half a character is a replacement character, as engines show it."""
    return vocabulary.bytes_of(token).decode("utf-8", "replace")


def logprob_entries(steps: Sequence[SampledToken], request: ModelRequest) -> list[dict[str, Any]]:
    """Write log-probabilities as `logprobs.content` of OpenAI's chat completions has them."""
    return [
        {
            **_entry(step.token, step.logprob, request),
            "top_logprobs": [
                _entry(other.token, other.logprob, request)
                for other in vocabulary.alternatives(step.token, step.logprob, request.top_logprobs)
            ],
        }
        for step in steps
    ]


def _entry(token: int, chance: float, request: ModelRequest) -> dict[str, Any]:
    text = f"token_id:{token}" if request.token_names_as_ids else token_text(token)
    return {"token": text, "logprob": chance, "bytes": list(vocabulary.bytes_of(token))}


def shown(answer: ScriptedAnswer, call: int | None = None) -> str:
    """Return what of an answer's text, or of a call's arguments, was within the token limit."""
    kind, index = ("text", -1) if call is None else ("arguments", call)
    return "".join(step.visible for step in answer.steps if step.kind == kind and step.call == index)


def opened(answer: ScriptedAnswer) -> list[int]:
    """Return the calls of an answer that were begun within the token limit."""
    return [step.call for step in answer.steps if step.kind == "open"]


def text_of(content: Any) -> str:
    """Return the text of a content field: a string, or a list of parts of which some are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            text = part.get("text")
            texts.append(text if isinstance(text, str) else f"[{part.get('type', 'part')}]")
    return "\n".join(texts)


def _objects(value: Any, problem: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(problem)
    return value


def _role(message: Mapping[str, Any], roles: Mapping[str, Role]) -> Role:
    role = roles.get(str(message.get("role")))
    if role is None:
        raise BadRequest(f"no message has the role {message.get('role')!r}")
    return role


def whole_number(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is a number."""
    for name in names:
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


# ---- OpenAI chat completions; token ids are where vLLM or SGLang put them ----


_CHAT_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatDialect(WireFormat):
    """`POST /v1/chat/completions`."""

    name = "openai_chat"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request."""
        messages = _objects(body.get("messages"), "messages must be a list of objects")
        if body.get("n") not in (None, 1):
            raise BadRequest("n must be 1: a script has one answer")
        tools = body.get("tools") or []
        schema = body.get("response_format") or {}
        options = body.get("stream_options") or {}
        return ModelRequest(
            model=str(body.get("model", "")),
            conversation=Conversation(
                joined(_chat_message(message) for message in messages),
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

    def whole(self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""
        message: dict[str, Any] = {"role": "assistant", "content": shown(answer) or None}
        calls = [(answer.calls[index], shown(answer, index)) for index in opened(answer)]
        if calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call, arguments in calls
            ]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": answer.finish}
        choice["logprobs"] = {"content": logprob_entries(answer.steps, request)} if request.logprobs else None
        result = _chat_envelope(request, identity, "chat.completion", [choice])
        result["usage"] = _usage(answer)
        if request.token_ids:
            _add_ids(result, choice, answer.steps, answer.prompt_ids, identity)
        return result

    def stream(
        self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
    ) -> Iterator[Chunk]:
        """Write an answer as server-sent events."""
        first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        opening = _chat_envelope(request, identity, "chat.completion.chunk", [first])
        if request.token_ids:
            _add_ids(opening, first, (), answer.prompt_ids, identity)
        yield Chunk(event(opening))
        for steps in groups(answer.steps, tokens_per_chunk):
            choice: dict[str, Any] = {"index": 0, "delta": _delta(steps, answer), "finish_reason": None}
            if request.logprobs:
                choice["logprobs"] = {"content": logprob_entries(steps, request)}
            chunk = _chat_envelope(request, identity, "chat.completion.chunk", [choice])
            if request.token_ids:
                _add_ids(chunk, choice, steps, None, identity)
            yield Chunk(event(chunk), steps)
        last = {"index": 0, "delta": {}, "finish_reason": answer.finish}
        yield Chunk(event(_chat_envelope(request, identity, "chat.completion.chunk", [last])))
        if request.usage:
            usage = _chat_envelope(request, identity, "chat.completion.chunk", [])
            yield Chunk(event({**usage, "usage": _usage(answer)}))
        yield Chunk(b"data: [DONE]\n\n")

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """Write an error."""
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _chat_message(message: Mapping[str, Any]) -> ScriptedMessage:
    role = _role(message, _CHAT_ROLES)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(ScriptedToolCall(str(function.get("name", "")), canonical(function.get("arguments") or {})))
    return ScriptedMessage(role, text_of(message.get("content")), calls)


def _chat_envelope(
    request: ModelRequest, identity: Identity, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": identity.response_id,
        "object": kind,
        "created": identity.created,
        "model": request.model,
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


# ---- Anthropic messages; the format has no place for token ids, so they are extra fields of events and body ----


_STOP_REASONS: dict[Finish, str] = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ANTHROPIC_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}


class MessagesDialect(WireFormat):
    """`POST /v1/messages`."""

    name = "anthropic"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request."""
        messages = [ScriptedMessage("system", text_of(body["system"]))] if body.get("system") else []
        for message in _objects(body.get("messages"), "messages must be a list of objects"):
            messages.extend(_messages(message))
        schema = (body.get("output_config") or {}).get("format") or body.get("output_format") or {}
        return ModelRequest(
            model=str(body.get("model", "")),
            conversation=Conversation(joined(messages), list(body.get("tools") or []), schema.get("schema")),
            stream=bool(body.get("stream")),
            max_tokens=whole_number(body, "max_tokens"),
            top_logprobs=whole_number(body, "top_logprobs") or 0,
            token_ids=bool(body.get("return_token_ids")),
            body=body,
        )

    def whole(self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""
        content: list[dict[str, Any]] = []
        if text := shown(answer):
            content.append({"type": "text", "text": text})
        for index in opened(answer):
            call = answer.calls[index]
            content.append(
                {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(shown(answer, index))}
            )
        body = _anthropic_envelope(request, answer, identity)
        body.update(content=content, stop_reason=_STOP_REASONS[answer.finish])
        body["usage"]["output_tokens"] = len(answer.steps)
        Carrier(request, identity).add_to(body, answer)
        return body

    def stream(
        self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
    ) -> Iterator[Chunk]:
        """Write an answer as server-sent events."""
        carrier = Carrier(request, identity)
        message = _anthropic_envelope(request, answer, identity)
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
    role = _role(message, _ANTHROPIC_ROLES)
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


def _anthropic_envelope(request: ModelRequest, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
    return {
        "id": f"msg_{identity.response_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
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


# ---- OpenAI responses; token ids are extra fields here too ----


_RESPONSES_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")


class ResponsesDialect(WireFormat):
    """`POST /v1/responses`, without state on the server: the whole conversation is in each request."""

    name = "openai_responses"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request."""
        items = body.get("input")
        if isinstance(items, str):
            items = [{"type": "message", "role": "user", "content": items}]
        items = _objects(items, "input must be a text or a list of objects")
        if body.get("previous_response_id"):
            raise BadRequest("previous_response_id: no conversation is kept here; send all of its items")
        messages = [ScriptedMessage("system", body["instructions"])] if body.get("instructions") else []
        messages.extend(message for item in items if (message := _responses_message(item)) is not None)
        schema = (body.get("text") or {}).get("format") or {}
        include = body.get("include") or []
        return ModelRequest(
            model=str(body.get("model", "")),
            conversation=Conversation(joined(messages), list(body.get("tools") or []), schema.get("schema")),
            stream=bool(body.get("stream")),
            max_tokens=whole_number(body, "max_output_tokens"),
            logprobs="message.output_text.logprobs" in include,
            top_logprobs=whole_number(body, "top_logprobs") or 0,
            token_ids=bool(body.get("return_token_ids")),
            body=body,
        )

    def whole(self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""
        cut = answer.finish == "length"
        body = _responses_envelope(request, identity, "incomplete" if cut else "completed")
        body["output"] = _output(request, answer, identity)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        prompt, completion = len(answer.prompt_ids), len(answer.steps)
        body["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        Carrier(request, identity).add_to(body, answer)
        return body

    def stream(
        self, request: ModelRequest, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
    ) -> Iterator[Chunk]:
        """Write an answer as server-sent events."""
        return _Stream(self, request, answer, identity).chunks(tokens_per_chunk)

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """Write an error."""
        return {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}


class _Stream:
    """The events of one reply, numbered."""

    def __init__(
        self, dialect: ResponsesDialect, request: ModelRequest, answer: ScriptedAnswer, identity: Identity
    ) -> None:
        self._request, self._answer, self._identity = request, answer, identity
        self._carrier = Carrier(request, identity)
        self._whole = dialect.whole(request, answer, identity)
        self._number = 0
        self._output = -1

    def chunks(self, tokens_per_chunk: int) -> Iterator[Chunk]:
        begun = _responses_envelope(self._request, self._identity, "in_progress")
        self._carrier.add_prompt(begun, self._answer)
        yield self._event("response.created", response=begun)
        yield self._event(
            "response.in_progress", response=_responses_envelope(self._request, self._identity, "in_progress")
        )
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
        more = {"logprobs": logprob_entries(steps, self._request) if self._request.logprobs else []}
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


def _responses_message(item: Mapping[str, Any]) -> ScriptedMessage | None:
    kind = item.get("type", "message")
    if kind in _CALLS:
        arguments = str(item.get("input", "")) if kind == "custom_tool_call" else canonical(item.get("arguments") or {})
        return ScriptedMessage("assistant", "", [ScriptedToolCall(str(item.get("name", "")), arguments)])
    if kind in _RESULTS:
        output = item.get("output")
        return ScriptedMessage("tool", text_of(output) if isinstance(output, str | list) else canonical(output))
    if kind == "message":
        return ScriptedMessage(_role(item, _RESPONSES_ROLES), text_of(item.get("content")))
    return None  # reasoning and other items are not part of a script


def _output(request: ModelRequest, answer: ScriptedAnswer, identity: Identity) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if answer.finish == "length" else "completed"
    if text := shown(answer):
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if request.logprobs:
            part["logprobs"] = logprob_entries([step for step in answer.steps if step.kind == "text"], request)
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


def _responses_envelope(request: ModelRequest, identity: Identity, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{identity.response_id}",
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
        "metadata": {"scripted": "true"},
    }
