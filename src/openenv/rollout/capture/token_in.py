"""Token-in, token-out: a call that continues a recorded answer sends its token IDs to the engine instead of messages.

A chat template writes an answer in its own way: other spaces in the arguments of a tool call, no thoughts, other
tokens for the same text. The next prompt then does not begin with the sampled tokens, and the conversation falls into
several training sequences. Here the engine gets the recorded tokens:

    recorded     prompt [1 2 3], sampled [4 5 E]            E ends an answer in the chat template
    rendered     [1 2 3 44 E 6 7 8]                         the engine's tokens of the next request
    sent         [1 2 3 4 5 E] + [6 7 8]                    recorded tokens, then the new messages

Knows the token routes of vLLM, SGLang and llama.cpp. Never tokenizes: the engine renders the new messages. Whatever is
not certain goes to the chat route, and becomes a sequence of its own:

- A request has a parameter that the token route lacks, or content other than text.
- No recorded answer is in the conversation, compared with canonical arguments and without thoughts.
- The end of the answer is not found in the rendered prompt.
- The request has tools, and `AnswerStyle` has not yet read a tool call exactly as the engine did.
- The engine lacks a route, or refuses the request.
"""

# The steps of one call:
#
#   TokenMemory.longest ----> TokenEngine.render ----> new_messages ----> TokenEngine.request ----> TokenCall
#   the recorded answer       the engine's tokens      those after it     the engine's request      on the request
#
#   the engine's answer ----> TokenCall.completion ----> a chat completion, recorded and relayed like any other

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..tasks.model_parameters import NEUTRAL_SAMPLING, Engine
from ..tasks.task import Model
from .dialects.dialect import EXPERTS, MALFORMED, ModelDialect, Sampled, as_dict, as_list, dicts_in
from .dialects.openai_chat import reduced_message
from .encoding import Json, dumps

Ask = Callable[[str, Json], Awaitable[Json | None]]
"""Posts a body to a path of the engine; returns the answer, or None for an error."""

_RECENT = 4  # answers, each with all IDs of its conversation: agents switch between few conversations
_SHAPE = frozenset(
    {"model", "messages", "tools", "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", EXPERTS}
)
_TEMPLATE = frozenset({"tools", "chat_template_kwargs"})
_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
_FREE = {"tool_choice": ("auto", None), "parallel_tool_calls": (True, None), "n": (1, None)}
"""Parameters that other routes lack, and their values without effect."""
_MARKS = ("one", "42")
THOUGHTS = ("reasoning_content", "reasoning")
"""The fields of a chat message for the model's thoughts."""
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


# -- recorded answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A recorded answer with the IDs of its conversation."""

    ids: array[int]
    """Prompt and sampled tokens."""
    messages: int
    """The number of messages up to and including the answer."""
    is_cut: bool
    """Whether the token limit ended it, so that its end token is missing."""


@dataclass(slots=True)
class TokenMemory:
    """The latest answers of a rollout, and what was learned about its engine."""

    engine: TokenEngine
    style: AnswerStyle = field(default_factory=lambda: AnswerStyle())
    end: int | None = None
    """The token that ends an answer in the chat template; None before it is known."""
    last_tokens: set[int] = field(default_factory=set)
    """The last tokens of answers that ended by themselves."""
    is_off: bool = False
    """Whether the engine lacks a route, or reads answers in a way that is unknown here."""
    _answers: OrderedDict[bytes, KnownAnswer] = field(default_factory=OrderedDict)

    def longest(self, body: Json) -> KnownAnswer | None:
        """Return the last recorded answer of a conversation."""
        marks = list(_marks(body))[:-1]  # at least one message comes after the answer
        for mark in reversed(marks):
            answer = self._answers.get(mark)
            if answer is not None:
                self._answers.move_to_end(mark)
                return answer
        return None

    def remember(
        self, body: Json, response: Json, prompt_ids: Iterable[int], reader: ModelDialect, *, was_read_here: bool
    ) -> None:
        """Keep an answer if the engine named all its tokens, and compare the engine's reading of it with ours.

        Args:
            body: The request, as messages.
            response: The chat completion.
            prompt_ids: The tokens of the prompt.
            reader: The dialect of both.
            was_read_here: Whether the answer came on the token route, so that the engine did not read it.
        """
        completion = reader.completion(response)
        sampled, message = completion.sampled, _message(response)
        ids = array("q", prompt_ids)
        if message is None or not sampled.has_ids or not ids:
            return
        is_cut = completion.finish_reason == "length"
        if not is_cut:
            self.last_tokens.add(_ids_of(sampled)[-1])
        if not was_read_here:
            # The last token is the end of the answer, except in streams of llama.cpp.
            pieces = _pieces(response)
            texts = [pieces] if is_cut else [pieces[:-1], pieces]
            self.style.learn([b"".join(each).decode("utf-8", "replace") for each in texts], message)
        ids.extend(_ids_of(sampled))
        messages = [*as_list(body.get("messages")), message]
        mark = list(_marks({**body, "messages": messages}))[-1]
        self._answers[mark] = KnownAnswer(ids, len(messages), is_cut)
        while len(self._answers) > _RECENT:
            self._answers.popitem(last=False)

    def forget(self) -> None:
        """Release the memory."""
        self._answers.clear()


def _marks(body: Json) -> Iterable[bytes]:
    """Yield the identity of a conversation up to each message.

    Everything that a template reads counts exactly, except for the assistant's messages: agents write arguments with
    other spaces, and drop thoughts.
    """
    mark = _digest(dumps({name: body[name] for name in sorted(_TEMPLATE) if body.get(name)}))
    for message in dicts_in(body.get("messages")):
        value = reduced_message(message) if message.get("role") == "assistant" else message
        mark = _digest(mark + dumps(value))
        yield mark


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _message(response: Json) -> Json | None:
    choices = dicts_in(response.get("choices"))
    return as_dict(choices[0].get("message")) or None if choices else None


# -- the text of an answer -------------------------------------------------------------------------------------------


def _ids_of(sampled: Sampled) -> list[int]:
    """Return the IDs of sampled tokens that have one."""
    return [token for token in sampled.ids if token is not None]


def _pieces(response: Json) -> list[bytes]:
    """Return the text of each sampled token; engines write special tokens out, too."""
    (choice, *_) = dicts_in(response.get("choices"))
    entries = dicts_in(as_dict(choice.get("logprobs")).get("content"))
    return [bytes(entry["bytes"]) if entry.get("bytes") else str(entry.get("token")).encode() for entry in entries]


@dataclass(slots=True)
class AnswerStyle:
    """Reads thoughts and tool calls in an answer's text: `<think>...</think>`, and calls as Hermes and Qwen write them.

    Engines read many more forms. So each answer of the chat route is read here as well, and the form counts only if
    the result equals the engine's message.
    """

    thoughts: str | None = None
    """The field of the message for thoughts; None if the engine leaves them in the text."""
    reads_calls: bool = False
    """Whether a tool call was read exactly as the engine did."""
    is_unknown: bool = False
    """Whether an answer was read otherwise than by the engine."""

    def learn(self, texts: Sequence[str], message: Json) -> None:
        """Compare the engine's message with those that are read in one of the texts."""
        thoughts = next((name for name in THOUGHTS if message.get(name)), None)
        style = replace(self, thoughts=thoughts or self.thoughts)
        wanted = _readable(message, thoughts)
        if all(_readable(style.read(text)[0], thoughts) != wanted for text in texts):
            self.is_unknown = True
            return
        self.thoughts = style.thoughts
        self.reads_calls = self.reads_calls or bool(message.get("tool_calls"))

    def allows(self, body: Json) -> bool:
        """Return whether the answer to a request can be read here."""
        return not self.is_unknown and (self.reads_calls or not body.get("tools"))

    def read(self, text: str) -> tuple[Json, bool]:
        """Return the message in a text, and whether it calls tools."""
        message: Json = {"role": "assistant", "content": None}
        if self.thoughts is not None and "</think>" in text:
            before, _, text = text.partition("</think>")
            message[self.thoughts] = before.replace("<think>", "", 1).strip("\n")
            text = text.lstrip("\n")
        calls = _tool_calls(text)
        if calls:
            message["tool_calls"] = calls
            text = text[: text.index("<tool_call>")].strip()
        message["content"] = text or None
        return message, bool(calls)


def _readable(message: Json, thoughts: str | None) -> list[object]:
    """Return what an agent can read of a message."""
    return [*reduced_message(message), None if thoughts is None else str(message.get(thoughts)).strip()]


def _tool_calls(text: str) -> list[Json]:
    """Return the tool calls in a text; empty if one of them is not valid, because engines then return plain text."""
    calls = []
    for match in _TOOL_CALL.finditer(text):
        try:
            value = json.loads(match[1])
        except (ValueError, RecursionError):
            return []
        name, arguments = as_dict(value).get("name"), as_dict(value).get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    return calls


# -- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """An engine's answer on its token route."""

    entries: list[Json]
    """A log-probability entry per sampled token, as in chat completions."""
    ids: list[int]
    text: str
    is_cut: bool
    more: Json = field(default_factory=dict)
    """Further fields of the choice."""
    version: str | None = None
    version_spans: list[Json] = field(default_factory=list)
    """The versions by sampled token, as the engine sends them."""


class TokenEngine(ABC):
    """The routes of one engine. Paths begin at the server's root."""

    path: ClassVar[str]
    """The route that takes token IDs."""
    names: ClassVar[dict[str, str]] = {}
    """Sampling parameters with another name on this route."""

    @abstractmethod
    async def render(self, ask: Ask, body: Json) -> list[int] | None:
        """Return the tokens of a chat request with the beginning of the answer; None if the engine does not say."""

    @abstractmethod
    def request(self, body: Json, ids: list[int], limit: int, sampling: Json) -> Json:
        """Return the request of the token route."""

    @abstractmethod
    def answer(self, value: Json) -> TokenAnswer:
        """Read an answer of the token route."""

    async def is_end(self, ask: Ask, token: int) -> bool:
        """Return whether a token can end an answer, if no answer has shown it: here unknown."""
        return False

    def sampling(self, body: Json) -> Json | None:
        """Return the sampling parameters of a chat request for this route; None if one of them has no form here."""
        values: Json = {}
        for name, value in body.items():
            if name in _SHAPE | _TEMPLATE | _LIMITS or value in _FREE.get(name, ()):
                continue
            if name not in _PLAIN or name not in self.parameters():
                return None
            values[self.names.get(name, name)] = value
        return values

    def parameters(self) -> frozenset[str]:
        """Return the sampling parameters of the route, by their names in chat completions."""
        return _PLAIN


_PLAIN = frozenset({"temperature", "seed", "repeat_penalty", *NEUTRAL_SAMPLING})
"""Parameters that mean the same on all routes."""


class VllmTokens(TokenEngine):
    """vLLM: `/tokenize` with messages, `/v1/completions` with IDs.

    References: vLLM, "OpenAI-Compatible Server", Tokenizer API and Completions API with `return_token_ids`.
    """

    path = "/v1/completions"

    async def render(self, ask: Ask, body: Json) -> list[int] | None:
        fields = {name: body[name] for name in ("model", "messages", *sorted(_TEMPLATE)) if body.get(name)}
        return _ids((await ask("/tokenize", {**fields, "add_generation_prompt": True}) or {}).get("tokens"))

    def request(self, body: Json, ids: list[int], limit: int, sampling: Json) -> Json:
        # Tool calls and thoughts are in special tokens in some models: without them, nothing could be read.
        shape = {"return_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False, "stream": False}
        logprobs = body.get("top_logprobs") or 0
        return {
            "model": body.get("model"),
            "prompt": ids,
            "max_tokens": limit,
            "logprobs": logprobs,
            **shape,
            **sampling,
        }

    def answer(self, value: Json) -> TokenAnswer:
        (choice, *_) = value["choices"]
        logprobs, ids = choice["logprobs"], choice["token_ids"]
        pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        entries = [{"token": token, "logprob": logprob, "top_logprobs": []} for token, logprob in pairs]
        more = {"routed_experts": choice["routed_experts"]} if choice.get("routed_experts") else {}
        spans = dicts_in(choice.get("weight_versions"))
        is_cut = choice.get("finish_reason") == "length"
        return TokenAnswer(entries, ids, choice["text"], is_cut, more, version_spans=spans)

    def parameters(self) -> frozenset[str]:
        return _PLAIN - {"repeat_penalty"}


class LlamaTokens(TokenEngine):
    """llama.cpp: `/apply-template` and `/tokenize`, `/v1/completions` with IDs."""

    path = "/v1/completions"

    async def render(self, ask: Ask, body: Json) -> list[int] | None:
        text = (await ask("/apply-template", body) or {}).get("prompt")
        if not isinstance(text, str):
            return None
        return await self._tokens(ask, text, parse_special=True)

    async def _tokens(self, ask: Ask, text: str, *, parse_special: bool) -> list[int] | None:
        asked = {"content": text, "add_special": parse_special, "parse_special": parse_special}
        return _ids((await ask("/tokenize", asked) or {}).get("tokens"))

    async def is_end(self, ask: Ask, token: int) -> bool:
        # A stream of llama.cpp leaves the end token out. Text cannot contain a special token, so the token is one if
        # its text becomes other tokens.
        text = (await ask("/detokenize", {"tokens": [token]}) or {}).get("content")
        tokens = await self._tokens(ask, text, parse_special=False) if isinstance(text, str) and text else None
        return tokens is not None and token not in tokens

    def request(self, body: Json, ids: list[int], limit: int, sampling: Json) -> Json:
        logprobs = max(1, body.get("top_logprobs") or 0)
        return {"model": body.get("model"), "prompt": ids, "max_tokens": limit, "logprobs": logprobs, **sampling}

    def answer(self, value: Json) -> TokenAnswer:
        (choice, *_) = value["choices"]
        entries = choice["logprobs"]["content"]
        ids = [entry["id"] for entry in entries]
        return TokenAnswer(entries, ids, choice["text"], choice.get("finish_reason") == "length")


class SglangTokens(TokenEngine):
    """SGLang: `/generate` with `input_ids`. It has no route that renders messages, so a chat request with one token
    does; its prompt is in the prefix cache afterwards.

    References: SGLang, "Sampling Parameters" (`/generate`) and "OpenAI APIs - Completions" (`return_token_ids`).
    """

    path = "/generate"
    names: ClassVar[dict[str, str]] = {"seed": "sampling_seed"}

    async def render(self, ask: Ask, body: Json) -> list[int] | None:
        fields = {name: body[name] for name in ("model", "messages", *sorted(_TEMPLATE)) if body.get(name)}
        value = await ask("/v1/chat/completions", {**fields, "max_tokens": 1, "return_token_ids": True})
        holders = [value or {}, *dicts_in((value or {}).get("choices")), as_dict((value or {}).get("sglext"))]
        found = (_ids(holder.get("prompt_token_ids")) for holder in holders)
        return next((ids for ids in found if ids), None)

    def request(self, body: Json, ids: list[int], limit: int, sampling: Json) -> Json:
        wanted = {"max_new_tokens": limit, "skip_special_tokens": False, **sampling}
        request = {"input_ids": ids, "sampling_params": wanted, "return_logprob": True, "stream": False}
        return {**request, EXPERTS: True} if body.get(EXPERTS) else request

    def answer(self, value: Json) -> TokenAnswer:
        about = value["meta_info"]
        triples = about["output_token_logprobs"]
        entries = [{"token": str(text or ""), "logprob": logprob, "id": token} for logprob, token, text in triples]
        finish = as_dict(about.get("finish_reason")).get("type")
        version = about.get("weight_version")
        more = {"routed_experts": about["routed_experts"]} if about.get("routed_experts") else {}
        ids = [token for _, token, _ in triples]
        spans = dicts_in(about.get("weight_versions"))
        version = None if version is None else str(version)
        return TokenAnswer(entries, ids, value["text"], finish == "length", more, version, spans)

    def parameters(self) -> frozenset[str]:
        return _PLAIN - {"repeat_penalty"}


TOKEN_ENGINES: dict[Engine, type[TokenEngine]] = {"vllm": VllmTokens, "sglang": SglangTokens, "llamacpp": LlamaTokens}
"""The engines with a route for token IDs."""


def token_memory(model: Model) -> TokenMemory | None:
    """Return a memory for a rollout's answers; None if the model's engine takes no token IDs."""
    engine = TOKEN_ENGINES.get(model.engine) if model.engine is not None else None
    is_captured = model.dialect == "openai_chat" and model.return_token_ids
    return TokenMemory(engine()) if engine is not None and model.token_in and is_captured else None


def _ids(value: object) -> list[int] | None:
    ids = as_list(value)
    return ids if ids and all(isinstance(token, int) and not isinstance(token, bool) for token in ids) else None


# -- one call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A call on the token route."""

    memory: TokenMemory
    body: Json
    """The request of the token route."""
    prompt: list[int]
    reused: int
    """The number of the prompt's tokens that come from the records."""
    model: str

    @property
    def path(self) -> str:
        """Return the route, from the server's root."""
        return self.memory.engine.path

    def completion(self, value: Json) -> Json:
        """Return the engine's answer as a chat completion.

        Raises:
            ValueError: The answer is not of the engine's form.
        """
        try:
            answer = self.memory.engine.answer(value)
        except MALFORMED as exc:
            raise ValueError(f"the engine's answer with tokens cannot be read: {exc}") from exc
        choice: Json = {"index": 0, "logprobs": {"content": answer.entries}, "token_ids": answer.ids, **answer.more}
        whole: Json = {"choices": [choice]}
        text = answer.text
        if not answer.is_cut and answer.ids and answer.ids[-1] == self.memory.end:
            # Engines differ in whether the text has the end token.
            text = text.removesuffix(str(as_dict(answer.entries[-1]).get("token") or ""))
        message, calls_tools = self.memory.style.read(text)
        choice["message"] = message
        choice["finish_reason"] = "length" if answer.is_cut else "stop"
        if calls_tools and not answer.is_cut:
            choice["finish_reason"] = "tool_calls"
        whole |= {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
        whole |= {"model": self.model, "prompt_token_ids": self.prompt}
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": len(answer.ids)}
        whole["usage"] = {**counts, "total_tokens": sum(counts.values())}
        if answer.version is not None:
            whole["metadata"] = {"weight_version": answer.version}
        if answer.version_spans:
            choice["weight_versions"] = answer.version_spans
        return whole


async def continue_with_tokens(memory: TokenMemory, body: Json, ask: Ask) -> TokenCall | None:
    """Return the call on the token route; None if the chat route must, or may as well, be used.

    Args:
        memory: The rollout's recorded answers.
        body: The request, as messages.
        ask: Posts to the engine.
    """
    limit = next((body[name] for name in sorted(_LIMITS) if isinstance(body.get(name), int)), None)
    sampling = memory.engine.sampling(body)
    if memory.is_off or limit is None or sampling is None or body.get("logprobs") is not True or not _is_text(body):
        return None
    known = memory.longest(body)
    if known is None or not memory.style.allows(body):
        return None
    rendered = await memory.engine.render(ask, body)
    if rendered is None:
        return None
    if rendered[: len(known.ids)] == list(known.ids):
        return None  # the template gives the same tokens, and the chat route can stream
    rest = await new_messages(memory, known, body, rendered, ask)
    if rest is None:
        return None
    prompt = [*known.ids, *rest]
    request = memory.engine.request(body, prompt, limit, sampling)
    return TokenCall(memory, request, prompt, len(known.ids), str(body.get("model") or ""))


async def new_messages(
    memory: TokenMemory, known: KnownAnswer, body: Json, rendered: Sequence[int], ask: Ask
) -> list[int] | None:
    """Return the tokens after a recorded answer: its end if it is missing, and the messages after it.

    The prompt is rendered again with another answer. What both have at their ends comes after the answer:

        with the answer       1 2 3 44 E 6 7 8
        with another one      1 2 3 99 E 6 7 8       both end with E 6 7 8

    Returns:
        None if the end of the answer is not certain.
    """
    if memory.end is None:
        memory.end = await _end_token(memory.engine, body, ask)
    end = memory.end
    if end is None:
        return None
    if known.ids[-1] != end:
        # The token limit ended the answer, or llama.cpp left the end out of a stream.
        may_append = known.is_cut or isinstance(memory.engine, LlamaTokens)
        if not may_append or not (end in memory.last_tokens or await memory.engine.is_end(ask, end)):
            return None
    messages = [dict(message) for message in body["messages"]]
    messages[known.messages - 1] = _other_answer(messages[known.messages - 1])
    other = await memory.engine.render(ask, {**body, "messages": messages})
    if other is None:
        return None
    tail = _common_end(rendered, other)
    if end not in tail:
        return None
    rest = tail[tail.index(end) + 1 :]
    return rest if known.ids[-1] == end else [end, *rest]


async def _end_token(engine: TokenEngine, body: Json, ask: Ask) -> int | None:
    """Return the token that the chat template writes after an answer."""
    fields = {name: body[name] for name in ("model", "chat_template_kwargs") if body.get(name)}
    prompts = []
    for mark in _MARKS:
        turns = [("user", "Hello"), ("assistant", mark), ("user", "Thanks")]
        messages = [{"role": role, "content": text} for role, text in turns]
        prompts.append(await engine.render(ask, {**fields, "messages": messages}))
    if prompts[0] is None or prompts[1] is None:
        return None
    return next(iter(_common_end(prompts[0], prompts[1])), None)


def _other_answer(message: Json) -> Json:
    """Return an assistant's message with another text, or with other arguments if it calls tools."""
    calls = dicts_in(message.get("tool_calls"))
    if not calls:
        return {"role": "assistant", "content": f"{_MARKS[0]} {_MARKS[1]}"}
    last = calls[-1]
    function = {**as_dict(last.get("function")), "arguments": json.dumps({_MARKS[0]: int(_MARKS[1])})}
    return {**message, "tool_calls": [*calls[:-1], {**last, "function": function}]}


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the longest end of both lists."""
    count = 0
    for first, second in zip(reversed(one), reversed(other), strict=False):
        if first != second:
            break
        count += 1
    return list(one[len(one) - count :])


def _is_text(body: Json) -> bool:
    """Return whether all messages are text: token routes take no images."""
    contents = [message.get("content") for message in dicts_in(body.get("messages"))]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(as_dict(part).get("type") == "text" for part in parts)
