"""The interfaces of dialects and bridges, and their shared helpers.

Values only, no IO: dialects turn requests, events and responses into others. Nothing is tokenised here: an ID or a
log-probability that the engine does not report is None.
"""

# The way of one call, with the methods of this module:
#
#   agent's request --[AgentDialect.read]--> body --[Bridge.request, between two dialects]--> body
#                   --[ModelDialect.rewrite: sampling, token limit, logprobs, token IDs]--> endpoint
#
#   endpoint's events --[take_prompt_ids]--> records --[strip_event]--> [Translator.feed]--> agent
#
# Later `records` reads the events again: [Assembler] --> response --[completion]--> `Completion` with its tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from ...tasks.model_parameters import AgentDialectName, Dialect, is_neutral, token_limit
from ..encoding import Json, dumps, event_bytes
from ..training_trace import VersionSpan

_ID_PREFIX = "token_id:"

# Agents and engines may send anything. These three read a value as the expected type, and never raise.


def as_dict(value: object) -> Json:
    """Return the value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return the value if it is a JSON list, else an empty one."""
    return value if isinstance(value, list) else []


def dicts_in(value: object) -> list[Json]:
    """Return the objects in a JSON list, without its other items."""
    return [item for item in as_list(value) if isinstance(item, dict)]


_ROLES = ("user", "assistant", "tool", "system", "developer")


# Every call repeats the conversation, and most of it is such messages. They need no closer look, at any length.
def is_text_message(item: object) -> bool:
    """Return whether an item is a message with nothing but a role and a text."""
    if not isinstance(item, dict) or len(item) != 2 or item.get("role") not in _ROLES:
        return False
    return isinstance(item.get("content"), str)


# The sampled tokens: IDs, log-probabilities and texts, aligned one to one.
#
#   ids       (19,    20,   None)       None: the engine gave no ID for this token
#   logprobs  (-0.1,  None, -0.3)       None: no log-probability, so this token is not trained on
#   texts     ("4",   "2",  "")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of one call: three lists of one length."""

    ids: tuple[int | None, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    texts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Codes of contradictions in the answer: `logprob_misalign`, `id_mismatch`, `positive_logprob`."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_ids(self) -> bool:
        """Return whether the engine gave an ID for every token."""
        return bool(self.ids) and None not in self.ids

    @property
    def has_logprobs(self) -> bool:
        """Return whether the engine gave a log-probability for any token."""
        return any(value is not None for value in self.logprobs)


@dataclass(slots=True)
class TokenLog:
    """Collects the IDs and log-probability entries of chunks, and aligns them at the end."""

    _pieces: list[tuple[list[int], list[Any]]] = field(default_factory=list)

    def add(self, ids: Any, entries: Any) -> None:
        """Add the lists of one chunk; a value that is not a list counts as empty."""
        # Not `isinstance`: a `bool` is an `int` in Python, and True would become token 1.
        tokens = [token for token in as_list(ids) if type(token) is int]
        if tokens or as_list(entries):
            self._pieces.append((tokens, as_list(entries)))

    def sampled(self) -> Sampled:
        """Return the aligned tokens."""
        all_ids = [token for ids, _ in self._pieces for token in ids]
        all_entries = [entry for _, entries in self._pieces for entry in entries]
        if not all_ids or not all_entries or len(all_ids) == len(all_entries):
            # The lists fit as a whole. vLLM may send an ID in one chunk and its entry in the next.
            return _aligned([(all_ids, all_entries)])
        # They do not fit. Pair chunk by chunk, so that a gap in one chunk does not shift the tokens of later ones.
        return _aligned(self._pieces)


def _aligned(pieces: Iterable[tuple[list[int], list[Any]]]) -> Sampled:
    ids: list[int | None] = []
    logprobs: list[float | None] = []
    texts: list[str] = []
    problems: set[str] = set()
    for tokens, entries in pieces:
        if tokens and entries and len(tokens) != len(entries):
            problems.add("logprob_misalign")
        # Keep the IDs of a chunk that does not fit, without its entries: a wrong pair is worse than a missing value.
        usable: Sequence[Any] = entries if not tokens or len(tokens) == len(entries) else []
        for position in range(max(len(tokens), len(usable))):
            entry: Any = usable[position] if position < len(usable) else None
            if tokens and _is_usual(entry):
                ids.append(tokens[position])
                logprobs.append(entry["logprob"])
                texts.append(entry["token"])
                continue
            entry_id, logprob, text = _entry(entry)
            token = tokens[position] if tokens else entry_id
            if tokens and entry_id is not None and entry_id != token:
                problems.add("id_mismatch")
            if logprob is not None and logprob > 0:  # no probability exceeds 1: the engine's value is something else
                problems.add("positive_logprob")
            ids.append(token)
            logprobs.append(logprob)
            texts.append(text)
    return Sampled(tuple(ids), tuple(logprobs), tuple(texts), tuple(sorted(problems)))


def _is_usual(entry: Any) -> bool:
    """Return whether an entry has a text and a log-probability, and no ID, as nearly all have."""
    if type(entry) is not dict or "id" in entry or "token_id" in entry:
        return False
    logprob, text = entry.get("logprob"), entry.get("token")
    return type(logprob) is float and -math.inf < logprob <= 0 and type(text) is str and not text.startswith(_ID_PREFIX)


def _entry(entry: Any) -> tuple[int | None, float | None, str]:
    """Read one log-probability entry: its token ID, its value, its text."""
    # {"token": "4", "logprob": -0.1, "top_logprobs": [...]}       chat completions in general
    # {"token": "4", "id": 19, "logprob": -0.1}                    llama.cpp; "token_id" in others
    # {"token": "token_id:19", "logprob": -0.1}                    vLLM with `return_tokens_as_token_ids`
    if not isinstance(entry, dict):
        return None, None, ""
    text = entry.get("token")
    text = text if isinstance(text, str) else ""
    token: int | None = None
    for key in ("id", "token_id"):
        value = entry.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            token = value
    if token is None and text.startswith(_ID_PREFIX) and text[len(_ID_PREFIX) :].isdigit():
        token = int(text[len(_ID_PREFIX) :])
    logprob = entry.get("logprob")
    # JSON cannot express infinity, but Python's parser accepts it: engines send -Infinity for a token they masked.
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float)) or not math.isfinite(logprob):
        return token, None, text
    return token, float(logprob), text


LOGPROBS = "logprobs"
TOKEN_IDS = "return_token_ids"
USAGE = "stream_options"
EXPERTS = "return_routed_experts"
STREAM = "stream"
"""The additions to a request (`forced`), named after the parameter that an endpoint may refuse."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The proxy's additions to an agent's request."""

    model: str
    """The model's name at the endpoint; empty to keep the agent's."""
    top_logprobs: int = 5
    return_token_ids: bool = True
    max_tokens: int | None = None
    """The token limit of the answer."""
    disable_thinking: bool = False
    routed_experts: bool = False
    """Whether answers come whole, because engines send the experts of each token with whole answers only."""
    asks_for_experts: bool = False
    """Whether the engine needs a parameter for them."""
    refused: frozenset[str] = frozenset()
    """Parameters that this endpoint has refused before."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's parameters, in the endpoint's dialect."""
    agent_may_set: Collection[str] = ()
    """Parameters in `sampling` that the agent's values replace."""
    seed: int | None = None
    """The seed of this call; only the dialect `openai_chat` has one."""

    def applied_to(self, body: Json) -> Json:
        """Return a request with the model's name and the trainer's parameters."""
        # `temperature` from the trainer and from the agent: the trainer's counts unless `agent_may_set` names it.
        trainers = {
            name: value
            for name, value in self.sampling.items()
            if (name not in body or name not in self.agent_may_set)
            and (self.allows(name) or not is_neutral(name, value))
        }
        return {**body, **trainers, "model": self.model or body.get("model")}

    def without(self, parameter: str) -> CallOptions:
        """Return these options with one more refused parameter."""
        return replace(self, refused=self.refused | {parameter})

    def allows(self, parameter: str) -> bool:
        """Return whether a parameter may be sent."""
        return parameter not in self.refused


@dataclass(frozen=True, slots=True)
class RewrittenRequest:
    """The endpoint's request, and the additions to hide in the answer to the agent."""

    body: Json
    forced: frozenset[str] = frozenset()
    limit: int | None = None
    """The token limit of the answer; None for no limit."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The content of a response of any dialect."""

    finish_reason: str | None = None
    sampled: Sampled = field(default_factory=Sampled)
    prompt_ids: Sequence[int] | None = None
    usage: Json | None = None
    error: Json | None = None
    """An error inside a stream."""
    policy_version: str | None = None
    """The version that the engine reports; of several, the oldest."""
    version_spans: tuple[VersionSpan, ...] = ()
    """The versions by sampled token, counted from 0, if the engine reports them."""
    routed_experts: str | None = None
    """The experts of each token, as the engine sends them (`routed_experts`)."""


class Assembler(Protocol):
    """Assembles the whole response from the events of a stream."""

    def feed(self, chunk: Json) -> None:
        """Take the data of one event."""

    def response(self) -> Json:
        """Return the response in the form without streaming, up to the last event."""


class AgentDialect(Protocol):
    """The dialect of an agent. `body` is the body of a request; methods never change their arguments."""

    name: ClassVar[AgentDialectName]
    counted_fields: ClassVar[tuple[str, ...]]
    """The fields of a request that count as prompt text."""

    def read(self, path: str, body: Json) -> Json:
        """Return the body with the facts from the path, such as Google's model name."""
        return body

    def error(self, status: int, message: str) -> Json:
        """Return an error in this dialect."""

    def error_event(self, status: int, message: str) -> bytes:
        """Return an error as an event, for a stream that has begun."""

    def final_answer(self, body: Json, text: str) -> Json:
        """Return a response that ends the agent's turn, with a text in place of the model's."""

    def stream(self, body: Json, response: Json) -> list[bytes]:
        """Return a whole response as events, for a request with `stream`."""

    def count_tokens(self, body: Json) -> Json:
        """Return an estimate, one token per four characters, as the dialect's token-count route answers."""
        return {"input_tokens": max(1, sum(text_length(body.get(name)) for name in self.counted_fields) // 4)}


class ModelDialect(AgentDialect, Protocol):
    """A dialect of agents and endpoints. `forced` names the additions to a request (`RewrittenRequest`)."""

    name: ClassVar[Dialect]
    path: ClassVar[str]
    """The path of a call, below `/v1`."""
    count_path: ClassVar[str | None] = None
    """The path that counts tokens; None if the dialect has none."""
    assembler: ClassVar[type[Assembler]]

    def rewrite(self, body: Json, options: CallOptions) -> RewrittenRequest:
        """Return the endpoint's request, with the names of its additions."""

    def strip_event(self, chunk: Json, forced: frozenset[str]) -> Json | None:
        """Return the agent's view of an event: the same object if nothing changes, None to drop the event."""
        return chunk

    def strip_response(self, response: Json, forced: frozenset[str]) -> Json:
        """Return the agent's view of a whole response: the same object if nothing changes."""
        return response

    def completion(self, response: Json) -> Completion:
        """Read a whole or assembled response."""

    def sampled_in(self, chunk: Json) -> int:
        """Return the number of sampled tokens in an event; 0 if it does not report them."""
        return 0

    def text_size(self, value: Json) -> int:
        """Return the bytes of text in an event or a response, thoughts and tool arguments included."""

    def is_end(self, chunk: Json) -> bool:
        """Return whether an event marks the proper end of the answer."""

    def completion_tokens(self, value: Json) -> int:
        """Return the total of sampled tokens that an event or a response reports; 0 if it reports none."""

    def take_prompt_ids(self, value: Json) -> list[int] | None:
        """Remove the prompt's IDs from an event or a response, in place, and return them."""
        return None

    def setting(self, body: Json) -> list[Any]:
        """Return the identity of an agent: its system texts and the names of its tools.

        Two calls with the same setting are taken for calls of one agent.
        """

    def items(self, body: Json) -> list[Any]:
        """Return the conversation of a request without system texts, oldest first, as values to compare."""

    def reply_items(self, response: Json) -> list[Any]:
        """Return the answer as `items` will return it from the next request of the conversation."""


class StreamTranslator:
    """Turns the chunks of one chat completion into the events of another dialect, as they come.

    A chunk has pieces of thoughts, text and tool calls. Other dialects have items instead, one open at a time: a
    piece that belongs to another item than the last one closes that item and opens its own.

        chunks   {"content":"Hel"}     {"content":"lo"}    {"tool_calls":[{"index":0,...}]}     the end
        events   open text, delta      delta               close text, open call, delta         close call, end

    A subclass adds the events with `_emit`, and keeps `whole` up to date.
    """

    whole: Json
    """The response in the other dialect, so far; an item is added when it is closed."""

    def __init__(self) -> None:
        self._out: list[Json] = []
        self._started = False
        self._finish: str | None = None
        self._usage: Json = {}
        self._error: str | None = None
        self._item: Json = {}
        self._key: tuple[str, int] | None = None  # of the open item: its kind, and the number of the tool call
        self._pieces: list[str] = []  # of the open item's text or arguments

    def feed(self, chunk: Json) -> bytes:
        """Take one chunk, and return its events, encoded."""
        return b"".join(map(self.encode, self.events_of(chunk)))

    def end(self) -> bytes:
        """Return the events that end the stream, encoded."""
        return b"".join(map(self.encode, self.end_events()))

    def encode(self, event: Json) -> bytes:
        """Encode an event."""
        return typed_event(event)

    def events_of(self, chunk: Json) -> list[Json]:
        """Take one chunk, and return its events as values."""
        # {"choices": [{"delta": {"content": "Hel"}}]}                                  text
        # {"choices": [{"delta": {"reasoning_content": "Let me"}}]}                     thoughts; "reasoning" in some
        # {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": ...}]}}]}           tool calls
        # {"choices": [{"delta": {}, "finish_reason": "stop"}]}                         the end
        # {"choices": [], "usage": {...}}                                               the usage
        self._start_once()
        if chunk.get("error"):
            error = chunk["error"]
            self._error = str(error.get("message") if isinstance(error, dict) else error)
        if chunk.get("usage"):
            self._usage = as_dict(chunk["usage"])
        for choice in (chunk.get("choices") or ())[:1]:  # the other dialects have one answer per request
            delta = choice.get("delta") or {}
            thoughts, text = delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")
            if isinstance(thoughts, str) and thoughts:
                self._think(thoughts)
            if isinstance(text, str) and text:
                self._say(text)
            for call in delta.get("tool_calls") or ():
                self._call(call, call.get("index") or 0, call.get("function") or {})
            self._finish = choice.get("finish_reason") or self._finish
        return self._take_events()

    def end_events(self) -> list[Json]:
        """Close the open item, and return the events that end the stream as values."""
        self._start_once()
        self._close()
        self._end()
        return self._take_events()

    def translate(self, response: Json) -> Json:
        """Return a whole completion in the other dialect, instead of chunks."""
        choice = (response.get("choices") or [{}])[0]
        message = dict(choice.get("message") or {})
        # The index distinguishes tool calls in a stream; in a whole answer it is missing, or null (SGLang).
        message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        # As a stream of one chunk: streams and whole answers then cannot differ.
        end = {"delta": message, "finish_reason": choice.get("finish_reason")}
        self.events_of({"choices": [end], "usage": response.get("usage"), "error": response.get("error")})
        self.end_events()
        return self.whole

    def _start_once(self) -> None:
        if not self._started:
            self._started = True
            self._start()

    def _open(self, key: tuple[str, int], item: Json) -> None:
        """Open an item, after closing another one; do nothing if it is open already."""
        if self._key != key:
            self._close()
            self._key, self._item, self._pieces = key, item, []
            self._item_opened(item)

    def _close(self) -> None:
        if self._key is not None:
            self._key = None
            self._item_closed(self._item, "".join(self._pieces))

    def _emit(self, kind: str, **fields: Any) -> None:
        self._out.append({"type": kind, **fields})

    def _take_events(self) -> list[Json]:
        out, self._out = self._out, []
        return out

    # A subclass implements these. `_think`, `_say` and `_call` take one piece each; `_item_closed` gets all pieces.

    def _start(self) -> None:
        raise NotImplementedError

    def _think(self, text: str) -> None:
        raise NotImplementedError

    def _say(self, text: str) -> None:
        raise NotImplementedError

    def _call(self, call: Json, index: int, function: Json) -> None:
        raise NotImplementedError

    def _item_opened(self, item: Json) -> None:
        raise NotImplementedError

    def _item_closed(self, item: Json, text: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class Translator(Protocol):
    """Turns an answer of the endpoint into the agent's dialect: event by event, or whole."""

    def feed(self, chunk: Json) -> bytes:
        """Take the data of one event, and return the agent's events, encoded."""

    def end(self) -> bytes:
        """Return the events that end the stream."""

    def translate(self, response: Json) -> Json:
        """Return a whole answer."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The translation between an agent and an endpoint of different dialects."""

    request: Callable[[Json], Json]
    """Translates the agent's request."""
    translator: Callable[[Json], Translator]
    """Makes the translator of one answer, from the agent's request."""


MALFORMED = (TypeError, AttributeError, KeyError, ValueError, IndexError)
"""The exceptions of a dialect that reads a value of another shape. Callers treat them as an invalid message."""


def error_kind(status: int) -> str:
    """Return the error type that OpenAI and Anthropic clients expect for a status."""
    # Anthropic API, "Errors": its clients retry by this type, for example on `overloaded_error`.
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        422: "invalid_request_error",
        429: "rate_limit_error",
        529: "overloaded_error",
    }
    return kinds.get(status, "api_error")


def capped(value: object, cap: int | None) -> int | None:
    """Return the smaller of a token limit and the cap; None without either."""
    limits = [limit for limit in (token_limit(value), cap) if limit is not None]
    return min(limits) if limits else None


def size_of(*texts: object) -> int:
    """Return the bytes of all texts among the values."""
    # `surrogatepass`: half of a surrogate pair is valid in JSON, and encoding it must not fail here.
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if isinstance(text, str))


def text_length(value: object) -> int:
    """Return the characters of all texts in a value, at any depth."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(text_length(item) for item in value.values())
    return sum(text_length(item) for item in as_list(value))


def count_in(usage: object, name: str) -> int:
    """Return a count of a usage object; 0 if it is missing."""
    count = as_dict(usage).get(name)
    return count if isinstance(count, int) else 0


def typed_event(data: Json) -> bytes:
    """Encode an event named after the `type` of its data, as in OpenAI responses and Anthropic messages."""
    return event_bytes(dumps(data), name=data["type"])
