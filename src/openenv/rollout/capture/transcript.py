"""A recording for human readers: for each call the new messages, the answer and its tokens.

An agent sends its whole conversation with every call. A transcript has each message once, at the first call with it.
It also names the branch of each call: the main conversation, a retry, a compaction or a sub-agent. Texts are unchanged
and come from agents and models: never render them as markup.

    calls as recorded              turns of the transcript
    1: [system, A]      -> B       1 main     new: system, A       reply: B
    2: [system, A, B, C] -> D      2 retry    new: C               reply: D
    3: [system, A, B, C] -> E      3 main     new: C               reply: E
    4: [title?, A]      -> F       4 auxiliary    new: title?, A   reply: F

`conversations` returns whole conversations as chat messages, for fine-tuning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any, Literal

from ..tasks.model_parameters import Dialect
from .dialects.dialect import MALFORMED, as_dict, as_list, dicts_in
from .encoding import Json
from .export import Level, graph_sequences, level, main_setting, rollout_findings
from .graph import CallGraph, CallNode, build, setting_of
from .records import Call, Recording
from .training_trace import Finding, Sequence

PartKind = Literal["text", "reasoning", "call", "result", "image", "other"]
Branch = Literal["main", "retry", "compaction", "sub-agent", "auxiliary"]
"""The part of a call in the rollout.

`main`: the agent's conversation. `retry`: an answer that the agent discarded and requested again. `compaction`: the
agent continued with a new, shorter conversation. `sub-agent`: a conversation in parallel. `auxiliary`: a single
question without tools, such as a request for a title.
"""

MOST_CHARACTERS = 200_000
"""The limit of one part of a message. Exports have no such limit."""
_DATA_IMAGE = re.compile(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/=_-]+")
_MEDIA_TYPE = re.compile(r"image/[\w.+-]+")
_BASE64 = re.compile(r"[A-Za-z0-9+/=_-]+")


@dataclass(frozen=True, slots=True)
class TranscriptPart:
    """A piece of a message."""

    kind: PartKind
    text: str = ""
    """The text, the arguments of a tool call, the result of one, or the data address of an image."""
    name: str = ""
    """The tool of a call; for other parts a label, such as `refusal` or `encrypted`."""
    call_id: str = ""
    """The ID of the tool call, in the call and in its result."""
    is_error: bool = False
    cut: int = 0
    """The number of characters cut off at the end."""


@dataclass(frozen=True, slots=True)
class TranscriptMessage:
    """A message of a conversation."""

    role: str
    parts: tuple[TranscriptPart, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptToken:
    """A sampled token."""

    text: str
    token_id: int | None
    logprob: float | None
    entropy: float | None
    """A lower bound in nats, from the alternatives that the engine reported."""
    is_trained: bool
    """Whether the loss mask of an exported sequence includes it."""
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class TranscriptTurn:
    """One model call: the new messages of its question, and its answer."""

    number: int
    branch: Branch
    parent: int | None
    """The number of the call before this one; None at the start of a conversation."""
    messages: list[TranscriptMessage]
    """The messages since the parent's answer; all messages without a parent."""
    reply: TranscriptMessage
    tools: list[str]
    """The names of the tools that the model could call."""
    model: str
    finish_reason: str | None
    ended: str | None
    status: int | None
    error: str | None
    not_trainable: list[str]
    started_at: float
    latency_s: float
    prompt_tokens: int | None
    sampled_tokens: int
    trained_tokens: int
    mean_logprob: float | None
    mean_entropy: float | None
    tokens: list[TranscriptToken] = field(default_factory=list)


@dataclass(slots=True)
class Transcript:
    """All calls of a rollout, in order of arrival."""

    turns: list[TranscriptTurn]
    findings: list[Finding]
    level: Level
    """The capture level: `tokens`, `logprobs` or `text`."""
    stops: int
    """The number of calls refused by the exhausted budget."""

    def document(self) -> Json:
        """Return the transcript as plain values, without tokens."""
        return {
            "turns": [_turn_document(turn) for turn in self.turns],
            "findings": [
                {"severity": each.severity, "code": each.code, "message": each.message, "call": each.call}
                for each in self.findings
            ],
            "level": self.level,
            "stops": self.stops,
        }


def transcript(recording: Recording) -> Transcript:
    """Return the transcript of a recording."""
    graph = build(recording.calls)
    nodes = {node.number: node for node in graph.nodes}
    branches = _branches(graph)
    exported = graph_sequences(graph)
    trained = _trained(graph, exported)
    turns = []
    for call in sorted(recording.calls, key=lambda call: call.number):
        node = nodes.get(call.number)
        parent = None if node is None else node.parent
        turns.append(_turn(call, parent, branches.get(call.number, "main"), trained.get(call.number, ())))
    findings = rollout_findings(recording, graph, exported)
    return Transcript(turns, findings, level(recording.calls), len(recording.stops))


def token_documents(turn: TranscriptTurn) -> list[Json]:
    """Return the tokens of a turn as plain values. The keys are short because there are many tokens."""
    return [
        {
            "t": token.text,
            "i": token.token_id,
            "p": None if token.logprob is None else round(token.logprob, 5),
            "h": None if token.entropy is None else round(token.entropy, 5),
            "m": int(token.is_trained),
            "a": [[text, round(value, 4)] for text, value in token.alternatives],
        }
        for token in turn.tokens
    ]


def _turn_document(turn: TranscriptTurn) -> Json:
    plain = {name: getattr(turn, name) for name in TranscriptTurn.__slots__ if name not in _NESTED}
    return {
        **plain,
        "messages": [_message_document(message) for message in turn.messages],
        "reply": _message_document(turn.reply),
    }


_NESTED = frozenset({"messages", "reply", "tokens"})


def _message_document(message: TranscriptMessage) -> Json:
    names = TranscriptPart.__slots__
    parts = [{name: value for name in names if (value := getattr(part, name))} for part in message.parts]
    return {"role": message.role, "parts": parts}


def _turn(call: Call, parent: CallNode | None, branch: Branch, trained: Iterable[int]) -> TranscriptTurn:
    tokens = list(_tokens(call, trained))
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    entropies = [token.entropy for token in tokens if token.entropy is not None]
    reply = answer(call) if call.sampled else None
    error = call.error or {}
    prompt = call.completion.prompt_ids
    return TranscriptTurn(
        number=call.number,
        branch=branch,
        parent=None if parent is None else parent.number,
        messages=_new_messages(call, None if parent is None else parent.call),
        reply=reply or TranscriptMessage("assistant"),
        tools=_tool_names(call),
        model=str(call.sent.get("model") or ""),
        finish_reason=call.completion.finish_reason,
        ended=call.ended,
        status=call.status,
        error=None if call.error is None else str(error.get("message") or error),
        not_trainable=list(call.not_trainable),
        started_at=call.started_at,
        latency_s=call.latency_s,
        prompt_tokens=len(prompt) if prompt is not None else _prompt_usage(call),
        sampled_tokens=len(tokens) or call.reader.completion_tokens({"usage": call.completion.usage}),
        trained_tokens=sum(token.is_trained for token in tokens),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        mean_entropy=sum(entropies) / len(entropies) if entropies else None,
        tokens=tokens,
    )


def _prompt_usage(call: Call) -> int | None:
    usage = as_dict(call.completion.usage)
    count = usage.get("prompt_tokens", usage.get("input_tokens"))
    return count if isinstance(count, int) else None


def _new_messages(call: Call, parent: Call | None) -> list[TranscriptMessage]:
    """Return the messages after the parent's question and answer."""
    if parent is None:
        return question(call)
    messages, before = _after_shared(call, parent)
    shared = 0
    while shared < min(len(before), len(messages)) and before[shared] == messages[shared]:
        shared += 1
    rest = messages[shared:]
    # The agent sends the parent's answer back, often without its thoughts. The parent's turn shows it already.
    said = _essence(answer(parent))
    while rest and rest[0].role == "assistant" and all(part in said for part in _essence(rest[0])):
        rest = rest[1:]
    return rest


def _after_shared(call: Call, parent: Call) -> tuple[list[TranscriptMessage], list[TranscriptMessage]]:
    """Return the conversations of two calls, both without the identical items at their start.

    A conversation repeats all earlier ones, so converting everything would take quadratic time.
    """
    name = "input" if call.endpoint_dialect == "openai_responses" else "messages"
    items, earlier = call.sent.get(name), parent.sent.get(name)
    heads = [[each.sent.get(key) for key in ("system", "instructions")] for each in (call, parent)]
    if not isinstance(items, list) or not isinstance(earlier, list) or heads[0] != heads[1]:
        return question(call), question(parent)
    same = (one is other or one == other for one, other in zip(items, earlier, strict=False))
    shared = sum(takewhile(bool, same))
    bare = {key: value for key, value in call.sent.items() if key not in ("system", "instructions")}
    rest = [{**bare, name: each[shared:]} for each in (items, earlier)]
    return _conversation(call.endpoint_dialect, rest[0]), _conversation(call.endpoint_dialect, rest[1])


def _essence(message: TranscriptMessage) -> list[tuple[str, str, str]]:
    """Return the comparable parts of a message: texts and tool calls, without IDs, thoughts and extra fields."""
    essence = []
    for part in message.parts:
        if part.kind == "call":
            essence.append(("call", part.name, _compact(part.text)))
        elif part.kind == "text" and part.text.strip():
            essence.append(("text", "", part.text.strip()))
    return essence


def _compact(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


# -- branches ------------------------------------------------------------------------------------------


def _branches(graph: CallGraph) -> dict[int, Branch]:
    main = main_setting(graph)
    roots: dict[int, Branch] = {}
    last_of_main = -1
    # Roots in order of time. A root with the agent's system text and tools is a compaction if the main conversation
    # has ended before it, and a sub-agent if the main conversation continues after it:
    #
    #     main        1--2--3                  main        1--2-----5
    #     compaction         4--5              sub-agent         3--4
    for root in sorted(graph.roots, key=lambda node: node.number):
        numbers = [node.number for node in _below(root)]
        if setting_of(root.call) != main:
            is_single = len(numbers) == 1 and not root.call.sent.get("tools")
            roots[root.number] = "auxiliary" if is_single else "sub-agent"
        elif last_of_main < 0:
            roots[root.number], last_of_main = "main", max(numbers)
        elif last_of_main < root.number:
            roots[root.number], last_of_main = "compaction", max(numbers)
        else:
            roots[root.number] = "sub-agent"
    branches: dict[int, Branch] = {}
    for root in graph.roots:
        for node in _below(root):
            branches[node.number] = "retry" if node.discarded else roots[root.number]
    return branches


def _below(root: CallNode) -> Iterator[CallNode]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)


# -- tokens -----------------------------------------------------------------------------------------------------------


def _trained(graph: CallGraph, exported: Iterable[Sequence]) -> dict[int, list[int]]:
    """Return the loss mask of each call, from the trainable sequences."""
    calls = {node.number: node.call for node in graph.nodes}
    masks: dict[int, list[int]] = {}
    for item in exported:
        if not item.trainable:
            continue
        for number in item.node_ids:
            done = calls[number].completion
            start = len(done.prompt_ids or ())
            mask = item.loss_mask[start : start + len(done.sampled)]
            if any(mask):  # a call may be in several sequences; one of them has its mask
                masks[number] = mask
    return masks


def _tokens(call: Call, trained: Iterable[int]) -> Iterator[TranscriptToken]:
    # {"token": "4", "logprob": -0.1, "top_logprobs": [{"token": "4", "logprob": -0.1}, {"token": "5", ...}]}
    # If an entry is missing, the others cannot be assigned to tokens: then no token gets alternatives.
    sampled = call.completion.sampled
    entries = _entries(call)
    mask = list(trained) or [0] * len(sampled)
    for index, (token_id, logprob, text) in enumerate(zip(sampled.ids, sampled.logprobs, sampled.texts, strict=True)):
        alternatives = _alternatives(entries[index]) if len(entries) == len(sampled) else ()
        yield TranscriptToken(text, token_id, logprob, entropy(alternatives), bool(mask[index]), alternatives)


def _entries(call: Call) -> list[Any]:
    """Return the log-probability entries of the answer, with the alternatives of each token."""
    response = as_dict(call.response)
    if call.endpoint_dialect == "openai_chat":
        choices = dicts_in(response.get("choices"))
        return as_list(as_dict(choices[0].get("logprobs")).get("content")) if choices else []
    if call.endpoint_dialect == "openai_responses":
        parts = [part for item in dicts_in(response.get("output")) for part in dicts_in(item.get("content"))]
        return [entry for part in parts for entry in as_list(part.get("logprobs"))]
    return []


def _alternatives(entry: Any) -> tuple[tuple[str, float], ...]:
    pairs = [(str(each.get("token")), each.get("logprob")) for each in dicts_in(as_dict(entry).get("top_logprobs"))]
    return tuple(
        (text, float(value))
        for text, value in pairs
        if isinstance(value, (int, float)) and math.isfinite(value) and value <= 0
    )


def entropy(alternatives: Iterable[tuple[str, float]]) -> float | None:
    """Return a lower bound for the entropy of a token's distribution; None without alternatives.

    The remaining probability counts as one more alternative. In truth it is spread over many tokens, which only
    increases the entropy.
    """
    # -0.1 and -3.0: probabilities 0.905 and 0.050, remaining 0.045.
    # Entropy: 0.905 * 0.1 + 0.050 * 3.0 + 0.045 * 3.1 = 0.38
    chances = [math.exp(value) for _, value in alternatives]
    if not chances:
        return None
    rest = max(0.0, 1.0 - sum(chances))
    return -sum(chance * math.log(chance) for chance in (*chances, rest) if chance > 1e-12)


# -- messages of the three dialects -----------------------------------------------------------------------------------


def question(call: Call) -> list[TranscriptMessage]:
    """Return the whole conversation of a call."""
    return _conversation(call.endpoint_dialect, call.sent)


def _conversation(dialect: Dialect, body: Json) -> list[TranscriptMessage]:
    try:
        return list(_QUESTIONS[dialect](body))
    except (*MALFORMED, RecursionError):  # an agent may send anything
        return [TranscriptMessage("user", (_other(body, "a request that cannot be read"),))]


def answer(call: Call) -> TranscriptMessage:
    """Return the answer of a call; an empty message if there is none."""
    return _reply(call.endpoint_dialect, call.response)


def _reply(dialect: Dialect, response: Json | None) -> TranscriptMessage:
    try:
        return _merged(_REPLIES[dialect](response or {}))
    except (*MALFORMED, RecursionError):
        return TranscriptMessage("assistant", (_other(response, "an answer that cannot be read"),))


def _merged(messages: Iterable[TranscriptMessage]) -> TranscriptMessage:
    return TranscriptMessage("assistant", tuple(part for message in messages for part in message.parts))


def _tool_names(call: Call) -> list[str]:
    tools = dicts_in(call.sent.get("tools"))
    return [str(as_dict(tool.get("function")).get("name") or tool.get("name") or tool.get("type")) for tool in tools]


def _chat_question(body: Json) -> Iterator[TranscriptMessage]:
    for message in dicts_in(body.get("messages")):
        yield _chat_message(message)


def _chat_reply(response: Json) -> Iterator[TranscriptMessage]:
    for choice in dicts_in(response.get("choices"))[:1]:
        yield _chat_message(as_dict(choice.get("message")))


# Chat completions: the result of a tool is a message with the role `tool`.
#
#     {"role": "assistant", "content": "Let me look.", "reasoning_content": "...", "tool_calls": [
#         {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": "{\"command\": \"ls\"}"}}]}
#     {"role": "tool", "tool_call_id": "call_1", "content": "README.md"}


def _chat_message(message: Json) -> TranscriptMessage:
    role = str(message.get("role") or "assistant")
    parts = list(_content(message.get("content")))
    if role in ("tool", "function"):
        call_id, name = str(message.get("tool_call_id") or ""), str(message.get("name") or "")
        return TranscriptMessage("tool", tuple(_results(parts, call_id, name)))
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thoughts, str) and thoughts:
        parts.insert(0, _text("reasoning", thoughts))
    for call in dicts_in(message.get("tool_calls")):
        function = as_dict(call.get("function") or call.get("custom"))
        arguments = function.get("arguments", function.get("input"))
        parts.append(_call(function.get("name"), arguments, call.get("id")))
    if isinstance(message.get("refusal"), str):
        parts.append(_text("other", message["refusal"], "refusal"))
    return TranscriptMessage("system" if role == "developer" else role, tuple(parts))


# Anthropic messages: system texts are a field, and a tool's result is a block of a user's message.
#
#     {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {...}}]}
#     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "README.md"}]}


def _anthropic_question(body: Json) -> Iterator[TranscriptMessage]:
    system = tuple(_content(body.get("system")))
    if system:
        yield TranscriptMessage("system", system)
    for message in dicts_in(body.get("messages")):
        parts = tuple(_content(message.get("content")))
        is_result = bool(parts) and all(part.kind == "result" for part in parts)
        yield TranscriptMessage("tool" if is_result else str(message.get("role") or "user"), parts)


def _anthropic_reply(response: Json) -> Iterator[TranscriptMessage]:
    yield TranscriptMessage("assistant", tuple(_content(response.get("content"))))


# OpenAI responses: thoughts, texts, calls and results are items of one list.
#
#     {"type": "reasoning", "summary": [{"type": "summary_text", "text": "..."}]}
#     {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": "{...}"}
#     {"type": "function_call_output", "call_id": "call_1", "output": "README.md"}


def _responses_question(body: Json) -> Iterator[TranscriptMessage]:
    if body.get("instructions"):
        yield TranscriptMessage("system", tuple(_content(body["instructions"])))
    given = body.get("input")
    if isinstance(given, str):
        yield TranscriptMessage("user", tuple(_content(given)))
    yield from map(_responses_item, dicts_in(given))


def _responses_reply(response: Json) -> Iterator[TranscriptMessage]:
    yield from map(_responses_item, dicts_in(response.get("output")))


def _responses_item(item: Json) -> TranscriptMessage:
    kind = str(item.get("type") or "message")
    if kind == "message":
        role = str(item.get("role") or "assistant")
        return TranscriptMessage("system" if role == "developer" else role, tuple(_content(item.get("content"))))
    if kind == "reasoning":
        texts = [*dicts_in(item.get("summary")), *dicts_in(item.get("content"))]
        thoughts = "\n\n".join(str(text.get("text") or "") for text in texts)
        return TranscriptMessage("assistant", (_text("reasoning", thoughts, "" if thoughts else "encrypted"),))
    if kind.endswith("_call_output"):
        results = _results(list(_content(item.get("output"))), str(item.get("call_id") or ""), "")
        return TranscriptMessage("tool", tuple(results))
    if kind.endswith("_call"):
        arguments = item.get("arguments", item.get("input", item.get("action")))
        return TranscriptMessage("assistant", (_call(item.get("name") or kind, arguments, item.get("call_id")),))
    return TranscriptMessage("assistant", (_other(item, kind),))


def _content(content: Any) -> Iterator[TranscriptPart]:
    """Yield the parts of a content: a text, or the blocks of any dialect."""
    if isinstance(content, str):
        if content:
            yield _text("text", content)
        return
    for block in as_list(content):
        if isinstance(block, str):
            yield _text("text", block)
        elif isinstance(block, dict):
            yield from _block(block)


def _block(block: Json) -> Iterator[TranscriptPart]:
    kind = str(block.get("type") or "")
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        yield _text("text", str(block.get("text") or ""))
    elif kind == "thinking":
        yield _text("reasoning", str(block.get("thinking") or ""))
    elif kind == "redacted_thinking":
        yield _text("reasoning", "", "encrypted")
    elif kind == "tool_use":
        yield _call(block.get("name"), block.get("input"), block.get("id"))
    elif kind == "tool_result":
        parts = list(_content(block.get("content")))
        yield from _results(parts, str(block.get("tool_use_id") or ""), "", is_error=bool(block.get("is_error")))
    elif kind in ("image", "image_url", "input_image"):
        yield _image(block)
    elif kind == "refusal":
        yield _text("other", str(block.get("refusal") or ""), "refusal")
    else:
        yield _other(block, kind or "block")


def _results(
    parts: list[TranscriptPart], call_id: str, name: str, *, is_error: bool = False
) -> Iterator[TranscriptPart]:
    """Yield the result of a tool: all its text as one part, then its images."""
    texts = "\n".join(part.text for part in parts if part.kind != "image")
    cut = sum(part.cut for part in parts)
    yield TranscriptPart("result", texts, name, call_id, is_error, cut)
    yield from (part for part in parts if part.kind == "image")


def _call(name: object, arguments: object, call_id: object) -> TranscriptPart:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    part = _text("call", text, str(name or ""))
    return TranscriptPart("call", part.text, part.name, str(call_id or ""), cut=part.cut)


def _image(block: Json) -> TranscriptPart:
    """Return an image with its data. An image at a URL becomes a text with the URL, and is never loaded."""
    # The patterns are strict: a viewer may use the text as the address of an image.
    source = as_dict(block.get("source"))
    media_type, data = str(source.get("media_type") or ""), source.get("data")
    if isinstance(data, str) and _MEDIA_TYPE.fullmatch(media_type) and _BASE64.fullmatch(data):
        return TranscriptPart("image", f"data:{media_type};base64,{data}")
    url = block.get("image_url", source.get("url"))
    url = as_dict(url).get("url") if isinstance(url, dict) else url
    if isinstance(url, str) and _DATA_IMAGE.fullmatch(url):
        return TranscriptPart("image", url)
    return _text("other", str(url or ""), "an image that is elsewhere")


def _other(value: object, name: str) -> TranscriptPart:
    try:
        text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    except (ValueError, RecursionError):  # nested too deeply, or a number of thousands of digits
        text = ""
    return _text("other", text, name)


def _text(kind: PartKind, text: str, name: str = "") -> TranscriptPart:
    return TranscriptPart(kind, text[:MOST_CHARACTERS], name, cut=max(0, len(text) - MOST_CHARACTERS))


_QUESTIONS = {
    "openai_chat": _chat_question,
    "anthropic": _anthropic_question,
    "openai_responses": _responses_question,
}
_REPLIES = {"openai_chat": _chat_reply, "anthropic": _anthropic_reply, "openai_responses": _responses_reply}


# -- conversations as chat messages, for fine-tuning and preference pairs -----------------------------------------
#
# Messages of chat endpoints are exactly those that were sent and answered; those of other dialects are translated.
# Calls that the agent abandoned, auxiliary calls such as a request for a title, and encrypted thoughts are left out.


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation with the agent's model, up to its last whole answer."""

    messages: list[dict[str, Any]]
    """In the form of chat completions; the arguments of a tool call are JSON text."""
    opening: int
    """The number of messages before the model's first answer."""
    tools: list[dict[str, Any]]
    """The tools of the last call, in the form of chat completions."""


def conversations(recording: Recording) -> list[Conversation]:
    """Return the agent's conversations; several if it compacted one, or has sub-agents of the same kind."""
    graph = build(recording.calls)
    main = main_setting(graph)
    leaves = sorted(graph.leaves, key=lambda leaf: leaf.number)
    paths = [leaf.path() for leaf in leaves if not leaf.discarded]
    whole = (_whole_conversation(path) for path in paths if setting_of(path[0].call) == main)
    return [each for each in whole if each is not None]


def _whole_conversation(path: list[CallNode]) -> Conversation | None:
    """Return the conversation of a path, up to the last whole answer; None without one."""
    calls = [node.call for node in path]
    while calls and (calls[-1].ended != "complete" or calls[-1].error is not None or not calls[-1].answer):
        calls.pop()
    if not calls:
        return None
    last = calls[-1]
    if last.endpoint_dialect != "openai_chat" and any(part.cut for part in _pieces(last)):
        return None  # a text is too long for a transcript
    return Conversation([*_asked(last), _answered(last)], len(_asked(calls[0])), _chat_tools(last))


def _pieces(call: Call) -> Iterator[TranscriptPart]:
    for message in (*question(call), answer(call)):
        yield from message.parts


def _asked(call: Call) -> list[Json]:
    if call.endpoint_dialect == "openai_chat":
        return dicts_in(call.sent.get("messages"))
    return [message for each in _joined(question(call)) for message in _in_chat_form(each)]


def _joined(messages: Iterable[TranscriptMessage]) -> Iterator[TranscriptMessage]:
    """Yield messages with one for consecutive pieces of an answer, which are several items in some dialects."""
    for role, pieces in groupby(messages, key=lambda message: message.role):
        if role == "assistant":
            yield TranscriptMessage(role, tuple(part for message in pieces for part in message.parts))
        else:
            yield from pieces


def _answered(call: Call) -> Json:
    if call.endpoint_dialect == "openai_chat":
        choices = dicts_in((call.response or {}).get("choices")) or [{}]
        message = as_dict(choices[0].get("message"))
        return {"role": "assistant", **{name: value for name, value in message.items() if value not in (None, [])}}
    return next(_in_chat_form(answer(call)), {"role": "assistant", "content": ""})


def _in_chat_form(message: TranscriptMessage) -> Iterator[Json]:
    """Yield a message of a transcript in the form of chat completions; each tool result is a message."""
    results = [part for part in message.parts if part.kind == "result"]
    for part in results:
        yield {"role": "tool", "tool_call_id": part.call_id, "content": part.text}
    parts = [part for part in message.parts if part.kind != "result"]
    if results and not parts:
        return
    said: Json = {"role": message.role, "content": "".join(part.text for part in parts if part.kind == "text")}
    thoughts = "".join(part.text for part in parts if part.kind == "reasoning")
    if thoughts:
        said["reasoning_content"] = thoughts
    calls = [part for part in parts if part.kind == "call"]
    if calls:
        functions = [(part.call_id, {"name": part.name, "arguments": part.text}) for part in calls]
        said["tool_calls"] = [{"id": key, "type": "function", "function": function} for key, function in functions]
    images = [{"type": "image_url", "image_url": {"url": part.text}} for part in parts if part.kind == "image"]
    if images:
        said["content"] = [{"type": "text", "text": said["content"]}, *images]
    yield said


def _chat_tools(call: Call) -> list[Json]:
    tools = dicts_in(call.sent.get("tools"))
    return [tool if "function" in tool else {"type": "function", "function": _chat_function(tool)} for tool in tools]


def _chat_function(tool: Json) -> Json:
    """Return a tool of another dialect as the function of a chat tool."""
    parameters = tool.get("parameters") or tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": parameters}
