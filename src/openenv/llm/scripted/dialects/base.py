"""What every dialect offers: read a request, write an answer as one body or as the events of a stream.

Pure: bytes and values in, bytes and values out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic_core import to_json

from ....testing.scripted import vocabulary
from ....testing.scripted.player import Conversation, SampledToken, ScriptedAnswer

Engine = Literal["vllm", "sglang", "plain"]
"""Where ids stand: as vLLM writes them, as SGLang writes them, or nowhere."""


class BadRequest(ValueError):
    """The request's body is not what the dialect asks for."""


@dataclass(slots=True)
class Chunk:
    """One piece of a stream, and the tokens that it carries."""

    data: bytes
    steps: Sequence[SampledToken] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

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
    """What a reply says of itself."""

    response_id: str
    created: int
    engine: Engine = "vllm"


class Dialect(ABC):
    """One wire format."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> Asked:
        """Read a request.

        Raises:
            BadRequest: It cannot be understood.
        """

    @abstractmethod
    def whole(self, asked: Asked, answer: ScriptedAnswer, identity: Identity) -> dict[str, Any]:
        """Write an answer as one body."""

    @abstractmethod
    def stream(
        self, asked: Asked, answer: ScriptedAnswer, identity: Identity, *, tokens_per_chunk: int
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
    """Puts ids and log-probabilities beside the events of dialects that have no place for them.

    An event carries its own tokens and those before it that show nothing, as two lists of the same length.
    """

    def __init__(self, asked: Asked, identity: Identity) -> None:
        self._asked = asked
        self._wanted = asked.token_ids and identity.engine != "plain"
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
            data["logprobs"] = logprob_entries(carried, self._asked)
        return Chunk(event(data, name), carried)

    def add_to(self, body: dict[str, Any], answer: ScriptedAnswer) -> None:
        """Put prompt and answer into a whole reply."""
        if self._wanted:
            body["prompt_token_ids"] = answer.prompt_ids
            body["token_ids"] = answer.token_ids
            body["logprobs"] = logprob_entries(answer.steps, self._asked)

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


def logprob_entries(steps: Sequence[SampledToken], asked: Asked) -> list[dict[str, Any]]:
    """Write log-probabilities as `logprobs.content` of OpenAI's chat completions has them."""
    return [
        {
            **_entry(step.token, step.logprob, asked),
            "top_logprobs": [
                _entry(other.token, other.logprob, asked)
                for other in vocabulary.alternatives(step.token, step.logprob, asked.top_logprobs)
            ],
        }
        for step in steps
    ]


def _entry(token: int, chance: float, asked: Asked) -> dict[str, Any]:
    text = f"token_id:{token}" if asked.token_names_as_ids else token_text(token)
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


def whole_number(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is a number."""
    for name in names:
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
