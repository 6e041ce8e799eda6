"""What a dialect and a bridge between two can do, and what they share.

Values only, no IO: dialects turn requests, events and responses into others. Nothing is tokenised here; what an engine
does not name is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from ...tasks.model_parameters import AgentDialectName, Dialect, token_limit
from ..encoding import Json, dumps, event_bytes

_ID_PREFIX = "token_id:"

# Agents and engines send anything: these three read a value as what it should be.


def as_dict(value: object) -> Json:
    """Return a JSON object, empty where the value is something else."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a JSON list, empty where the value is something else."""
    return value if isinstance(value, list) else []


def dicts_in(value: object) -> list[Json]:
    """Return the objects in a JSON list."""
    return [item for item in as_list(value) if isinstance(item, dict)]


# What was sampled: ids, log-probabilities and texts, aligned one to one.


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled in one call: three lists of one length."""

    ids: tuple[int | None, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    texts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Codes of what did not fit together: `logprob_misalign`, `id_mismatch`, `positive_logprob`."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_ids(self) -> bool:
        """Say whether the engine gave an id for every token."""
        return bool(self.ids) and None not in self.ids

    @property
    def has_logprobs(self) -> bool:
        """Say whether the engine gave a log-probability for any token."""
        return any(value is not None for value in self.logprobs)


@dataclass(slots=True)
class TokenLog:
    """Collects ids and log-probability entries as they come, and aligns them at the end."""

    _pieces: list[tuple[list[int], list[Any]]] = field(default_factory=list)

    def add(self, ids: Any, entries: Any) -> None:
        """Add what one chunk names: `ids` and `entries` are the engine's lists, or anything where it has none."""
        tokens = [token for token in as_list(ids) if isinstance(token, int) and not isinstance(token, bool)]
        if tokens or as_list(entries):
            self._pieces.append((tokens, as_list(entries)))

    def sampled(self) -> Sampled:
        """Return the tokens, aligned."""
        all_ids = [token for ids, _ in self._pieces for token in ids]
        all_entries = [entry for _, entries in self._pieces for entry in entries]
        if not all_ids or not all_entries or len(all_ids) == len(all_entries):
            return _aligned([(all_ids, all_entries)])
        return _aligned(self._pieces)  # pair chunk by chunk: a gap in one does not shift all that follow


def _aligned(pieces: Iterable[tuple[list[int], list[Any]]]) -> Sampled:
    ids: list[int | None] = []
    logprobs: list[float | None] = []
    texts: list[str] = []
    problems: set[str] = set()
    for tokens, entries in pieces:
        if tokens and entries and len(tokens) != len(entries):
            problems.add("logprob_misalign")
        usable: Sequence[Any] = entries if not tokens or len(tokens) == len(entries) else []
        for position in range(max(len(tokens), len(usable))):
            entry = usable[position] if position < len(usable) else None
            named, logprob, text = _entry(entry)
            token = tokens[position] if tokens else named
            if tokens and named is not None and named != token:
                problems.add("id_mismatch")
            if logprob is not None and logprob > 0:
                problems.add("positive_logprob")
            ids.append(token)
            logprobs.append(logprob)
            texts.append(text)
    return Sampled(tuple(ids), tuple(logprobs), tuple(texts), tuple(sorted(problems)))


def _entry(entry: Any) -> tuple[int | None, float | None, str]:
    """Read one log-probability entry: the id that it names, the value, the text."""
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
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float)) or not math.isfinite(logprob):
        return token, None, text
    return token, float(logprob), text


LOGPROBS = "logprobs"
TOKEN_IDS = "return_token_ids"
USAGE = "stream_options"
STREAM = "stream"
"""What may be forced into a request, named after the parameter that an endpoint may refuse."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a request to the endpoint has beyond what the agent asks."""

    model: str
    """The endpoint's name of the model; empty for the agent's."""
    top_logprobs: int = 5
    return_token_ids: bool = True
    max_tokens: int | None = None
    """The most tokens that the answer may have."""
    disable_thinking: bool = False
    refused: frozenset[str] = frozenset()
    """Parameters that this endpoint has turned down before."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's parameters, in the endpoint's dialect."""
    agent_may_set: Collection[str] = ()
    """Those of them that the agent's values replace."""

    def applied_to(self, body: Json) -> Json:
        """Return a request with the model and the trainer's parameters in it."""
        trainers = {
            name: value for name, value in self.sampling.items() if name not in body or name not in self.agent_may_set
        }
        return {**body, **trainers, "model": self.model or body.get("model")}

    def without(self, parameter: str) -> CallOptions:
        """Return the same options, less one parameter."""
        return replace(self, refused=self.refused | {parameter})

    def allows(self, parameter: str) -> bool:
        """Say whether a parameter may be sent."""
        return parameter not in self.refused


@dataclass(frozen=True, slots=True)
class RewrittenRequest:
    """A request as it goes to the endpoint, and what was forced into it that the agent must not see again."""

    body: Json
    forced: frozenset[str] = frozenset()
    limit: int | None = None
    """How many tokens the answer may have; None for no limit."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a response holds, whatever its dialect."""

    finish_reason: str | None = None
    sampled: Sampled = field(default_factory=Sampled)
    prompt_ids: tuple[int, ...] | None = None
    usage: Json | None = None
    error: Json | None = None
    """An error that came inside of a stream."""
    policy_version: str | None = None


class Assembler(Protocol):
    """Puts a stream back together, event by event."""

    def feed(self, chunk: Json) -> None:
        """Take the data of one event."""

    def response(self) -> Json:
        """Return the response that a call without streaming would have had, as far as the stream got."""


class AgentDialect(Protocol):
    """What an agent speaks. `body` is that of a request; values that are passed in stay as they are."""

    name: ClassVar[AgentDialectName]
    counted_fields: ClassVar[tuple[str, ...]]
    """The parts of a request whose tokens are counted."""

    def read(self, path: str, body: Json) -> Json:
        """Return a request with what its path says about it, such as the model, in the body."""
        return body

    def error(self, status: int, message: str) -> Json:
        """Return an error in the dialect's shape."""

    def error_event(self, status: int, message: str) -> bytes:
        """Return an error as an event of a stream that has begun."""

    def final_answer(self, body: Json, text: str) -> Json:
        """Return a response that ends the agent's turn with a text, as if the model had said it."""

    def stream(self, body: Json, response: Json) -> list[bytes]:
        """Return a whole response as the events of the stream that a request asked for."""

    def count_tokens(self, body: Json) -> Json:
        """Return an estimate in the shape of the dialect's token-count route: a token for every four characters."""
        return {"input_tokens": max(1, sum(text_length(body.get(name)) for name in self.counted_fields) // 4)}


class ModelDialect(AgentDialect, Protocol):
    """What agents and endpoints speak. `forced` names what was forced into a request."""

    name: ClassVar[Dialect]
    path: ClassVar[str]
    """Where an endpoint of this dialect answers, below `/v1`."""
    count_path: ClassVar[str | None] = None
    """Where it counts tokens, if it has such a route."""
    assembler: ClassVar[type[Assembler]]

    def rewrite(self, body: Json, options: CallOptions) -> RewrittenRequest:
        """Return the request as the endpoint gets it, and what was forced into it."""

    def strip_event(self, chunk: Json, forced: frozenset[str]) -> Json | None:
        """Return what the agent sees of an event: the same object where nothing changes, None for nothing at all."""
        return chunk

    def strip_response(self, response: Json, forced: frozenset[str]) -> Json:
        """Return what the agent sees of a whole response: the same object where nothing changes."""
        return response

    def completion(self, response: Json) -> Completion:
        """Read a whole or assembled response."""

    def sampled_in(self, chunk: Json) -> int:
        """Return how many tokens an event brings, as far as it says."""
        return 0

    def text_size(self, value: Json) -> int:
        """Return how many bytes of text (thoughts and arguments of tools too) an event or a response brings."""

    def is_end(self, chunk: Json) -> bool:
        """Say whether an event marks the proper end of what the model had to say."""

    def completion_tokens(self, value: Json) -> int:
        """Return how many tokens an event or a response says were sampled in all; 0 where it does not say."""

    def take_prompt_ids(self, value: Json) -> list[int] | None:
        """Cut the prompt's ids out of an event or a response, in place, and return them."""
        return None

    def setting(self, body: Json) -> list[Any]:
        """Return what makes two conversations those of one agent: its system texts and the names of its tools."""

    def items(self, body: Json) -> list[Any]:
        """Return the request's conversation without system texts, oldest first, as plain values to compare."""

    def reply_items(self, response: Json) -> list[Any]:
        """Return what the response adds to the conversation, in the shape that `items` gives it later."""


class StreamTranslator:
    """Turns the chunks of one chat completion into the events of another dialect, as they come.

    A chunk has pieces of thoughts, text and tool calls. Other dialects have items instead, one open at a time: a
    piece that belongs to another item than the last one closes that item and opens its own.

        chunks   {"content":"Hel"}     {"content":"lo"}    {"tool_calls":[{"index":0,...}]}     the end
        events   open text, delta      delta               close text, open call, delta         close call, end

    A subclass adds the events with `_emit`, and keeps `whole` up to date.
    """

    whole: Json
    """The response in the other dialect, as it stands; items are in it once they are closed."""

    def __init__(self) -> None:
        self._out: list[Json] = []
        self._started = False
        self._finish: str | None = None
        self._usage: Json = {}
        self._error: str | None = None
        self._item: Json = {}
        self._key: tuple[str, int] | None = None  # of the open item: its kind, and which of several tool calls
        self._pieces: list[str] = []  # of the open item's text or arguments

    def feed(self, chunk: Json) -> bytes:
        """Take one chunk, and return the events that follow from it."""
        return b"".join(map(self.encode, self.events_of(chunk)))

    def end(self) -> bytes:
        """Return the events that end the stream."""
        return b"".join(map(self.encode, self.end_events()))

    def encode(self, event: Json) -> bytes:
        """Return an event as it is sent."""
        return typed_event(event)

    def events_of(self, chunk: Json) -> list[Json]:
        """Take one chunk, and return the events that follow from it as values."""
        self._start_once()
        if chunk.get("error"):
            error = chunk["error"]
            self._error = str(error.get("message") if isinstance(error, dict) else error)
        if chunk.get("usage"):
            self._usage = as_dict(chunk["usage"])
        for choice in (chunk.get("choices") or ())[:1]:
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
        """Return the events that end the stream as values."""
        self._start_once()
        self._close()
        self._end()
        return self._take_events()

    def translate(self, response: Json) -> Json:
        """Take a whole completion instead of chunks, and return it in the other dialect."""
        choice = (response.get("choices") or [{}])[0]
        message = dict(choice.get("message") or {})
        # The index distinguishes tool calls in a stream; in a whole answer it is missing, or null (SGLang).
        message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        end = {"delta": message, "finish_reason": choice.get("finish_reason")}
        self.events_of({"choices": [end], "usage": response.get("usage"), "error": response.get("error")})
        self.end_events()
        return self.whole

    def _start_once(self) -> None:
        if not self._started:
            self._started = True
            self._start()

    def _open(self, key: tuple[str, int], item: Json) -> None:
        """Open an item unless it is the open one; the one before it is closed."""
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

    # a subclass has these

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
    """Turns an answer from the endpoint's dialect into the agent's: event by event, or whole."""

    def feed(self, chunk: Json) -> bytes:
        """Take the data of one event, and return the events that follow from it."""

    def end(self) -> bytes:
        """Return the events that end the stream."""

    def translate(self, response: Json) -> Json:
        """Return a whole answer."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """What lets an agent of one dialect talk to an endpoint of another."""

    request: Callable[[Json], Json]
    """Returns the agent's request in the endpoint's dialect."""
    translator: Callable[[Json], Translator]
    """Returns a translator for the answer to a request of the agent."""


MALFORMED = (TypeError, AttributeError, KeyError, ValueError, IndexError)
"""What a dialect may raise for a value that is not in its dialect at all."""


def error_kind(status: int) -> str:
    """Return the word that OpenAI and Anthropic clients expect for a status."""
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
    """Return a token limit that is within the cap."""
    limits = [limit for limit in (token_limit(value), cap) if limit is not None]
    return min(limits) if limits else None


def size_of(*texts: object) -> int:
    """Return how many bytes those values have that are text."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if isinstance(text, str))


def text_length(value: object) -> int:
    """Return how many characters the texts in a value have."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(text_length(item) for item in value.values())
    return sum(text_length(item) for item in as_list(value))


def count_in(usage: object, name: str) -> int:
    """Return a count of a usage object; 0 where it has none."""
    count = as_dict(usage).get(name)
    return count if isinstance(count, int) else 0


def typed_event(data: Json) -> bytes:
    """Write an event whose name is the `type` of its data, as responses and messages have them."""
    return event_bytes(dumps(data), name=data["type"])
