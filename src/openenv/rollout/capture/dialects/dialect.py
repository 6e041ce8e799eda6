"""What every dialect module offers, and the values that they share.

Knows JSON values only. Dialect modules do no IO: they turn requests, events and responses into others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...task import Dialect
from ..encoding import Json

# tokens: Token ids, log-probabilities and texts of what a model sampled, aligned one to one.
#
# Knows the shapes in which engines send them (vLLM, SGLang, llama.cpp, OpenAI). Nothing is tokenised here: what the
# engine does not say is None.


_ID_PREFIX = "token_id:"


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
        """Take what one chunk said: `ids` and `entries` are the engine's lists, or anything where it has none."""
        known = _ids_in(ids)
        listed = entries if isinstance(entries, list) else []
        if known or listed:
            self._pieces.append((known, listed))

    def __len__(self) -> int:
        """Return how many tokens were sampled so far, as far as the engine says."""
        return max(sum(len(ids) for ids, _ in self._pieces), sum(len(entries) for _, entries in self._pieces))

    def sampled(self) -> Sampled:
        """Return the tokens, aligned."""
        all_ids = [token for ids, _ in self._pieces for token in ids]
        all_entries = [entry for _, entries in self._pieces for entry in entries]
        if not all_ids or not all_entries or len(all_ids) == len(all_entries):
            return _aligned([(all_ids, all_entries)])
        return _aligned(self._pieces)  # pair chunk by chunk: a gap in one does not shift all that follow


def _ids_in(value: Any) -> list[int]:
    if not isinstance(value, list):
        return []
    return [token for token in value if isinstance(token, int) and not isinstance(token, bool)]


def _aligned(pieces: Iterable[tuple[list[int], list[Any]]]) -> Sampled:
    ids: list[int | None] = []
    logprobs: list[float | None] = []
    texts: list[str] = []
    problems: set[str] = set()
    for known, entries in pieces:
        if known and entries and len(known) != len(entries):
            problems.add("logprob_misalign")
        usable: Sequence[Any] = entries if not known or len(known) == len(entries) else []
        for position in range(max(len(known), len(usable))):
            entry = usable[position] if position < len(usable) else None
            said, logprob, text = _entry(entry)
            token = known[position] if known else said
            if known and said is not None and said != token:
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
    """What is asked of an endpoint beyond what the agent asks."""

    model: str
    top_logprobs: int = 5
    return_token_ids: bool = True
    max_tokens: int | None = None
    disable_thinking: bool = False
    refused: frozenset[str] = frozenset()
    """Parameters that this endpoint has turned down before."""

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

    @property
    def done(self) -> bool:
        """Say whether the stream reached its proper end."""


class StreamTranslator(Protocol):
    """Turns the events of one dialect into those of another, as they come."""

    def feed(self, chunk: Json) -> bytes:
        """Take one event's data, and return the events that follow from it."""

    def end(self) -> bytes:
        """Return the events that end the stream."""


class Bridge(Protocol):
    """The functions of a module that lets an agent of one dialect talk to an endpoint of another."""

    def request(self, body: Json) -> Json:
        """Return the agent's request in the endpoint's dialect."""

    def response(self, body: Json, response: Json) -> Json:
        """Return the endpoint's response in the agent's dialect."""

    def translator(self, body: Json) -> StreamTranslator:
        """Return a translator for the events of one stream."""


class DialectModule(Protocol):
    """The functions of a dialect module."""

    NAME: Dialect
    PATH: str
    """Where an endpoint of this dialect answers, below `/v1`."""

    def rewrite(self, body: Json, options: CallOptions) -> RewrittenRequest:
        """Return the request as the endpoint gets it; the given body stays as it is."""

    def strip_event(self, chunk: Json, forced: frozenset[str]) -> Json | None:
        """Return what the agent sees of an event: the same object where nothing changes, None for nothing at all."""

    def strip_response(self, response: Json, forced: frozenset[str]) -> Json:
        """Return what the agent sees of a whole response: the same object where nothing changes."""

    def assembler(self) -> Assembler:
        """Return an empty assembler."""

    def completion(self, response: Json) -> Completion:
        """Read a whole or assembled response."""

    def sampled_in(self, chunk: Json) -> int:
        """Return how many tokens an event brings, as far as it says."""

    def is_end(self, chunk: Json) -> bool:
        """Say whether an event marks the proper end of what the model had to say."""

    def completion_tokens(self, value: Json) -> int:
        """Return how many tokens an event or a response says were sampled in all; 0 where it does not say."""

    def take_prompt_ids(self, value: Json) -> list[int] | None:
        """Cut the prompt's ids out of an event or a response, in place, and return them."""

    def error(self, status: int, message: str) -> Json:
        """Return an error in the dialect's shape."""

    def error_event(self, status: int, message: str) -> bytes:
        """Return an error as an event of a stream that has begun."""

    def final_answer(self, body: Json, text: str) -> Json:
        """Return a response that ends the agent's turn with a text, as if the model had said it."""

    def stream(self, body: Json, response: Json) -> list[bytes]:
        """Return a whole response as the events of the stream that a request asked for."""

    def count_tokens(self, body: Json) -> Json:
        """Return an estimate in the shape of the dialect's token-count route."""

    def setting(self, body: Json) -> list[Any]:
        """Return what makes two conversations those of one agent: its system texts and the names of its tools."""

    def items(self, body: Json) -> list[Any]:
        """Return the request's conversation without system texts, oldest first, as plain values to compare."""

    def reply_items(self, response: Json) -> list[Any]:
        """Return what the response adds to the conversation, in the shape that `items` gives it later."""


MALFORMED = (TypeError, AttributeError, KeyError, ValueError, IndexError)
"""What a dialect module may raise over a value that is not in its dialect at all."""


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


def capped(asked: Any, cap: int | None) -> int | None:
    """Return a token limit that is within the cap."""
    limit = asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else None
    if cap is None:
        return limit
    return cap if limit is None else min(limit, cap)


def text_length(value: Any) -> int:
    """Return how many characters of text a JSON value holds."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(text_length(item) for item in value.values())
    if isinstance(value, list):
        return sum(text_length(item) for item in value)
    return 0
