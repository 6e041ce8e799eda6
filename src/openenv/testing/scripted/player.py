"""Find a script's reply to a conversation, and sample it token by token.

Knows scripts, conversations and tokens. Must not know wire formats or servers. The chat template is artificial, but
behaves like a real one: a prompt starts with the IDs of the previous prompt and its reply, and new messages follow.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from pydantic_core import from_json, to_json

from . import vocabulary
from .script import PREFIX, Failure, Script, ScriptedCall, Turn
from .vocabulary import Tokenizer

Role = Literal["system", "user", "assistant", "tool"]

_ROLE_TOKENS: dict[Role, int] = {
    "system": vocabulary.SYSTEM,
    "user": vocabulary.USER,
    "assistant": vocabulary.ASSISTANT,
    "tool": vocabulary.TOOL,
}
_FOLDERS = (
    re.compile(r"<cwd>(/[^<]*)</cwd>"),  # Codex
    re.compile(r"working directory:\s*`?(/[^\s`]*)", re.IGNORECASE),  # OpenCode, Claude Code
)


@dataclass(frozen=True, slots=True)
class ScriptedToolCall:
    """A tool call with its arguments as text: canonical JSON, or the input of a free-form tool."""

    name: str
    arguments: str
    call_id: str = ""
    free_form: bool = False


@dataclass(slots=True)
class ScriptedMessage:
    """A message of one side."""

    role: Role
    text: str = ""
    calls: list[ScriptedToolCall] = field(default_factory=list)


@dataclass(slots=True)
class ScriptedConversation:
    """The conversation that a request continues."""

    messages: list[ScriptedMessage]
    tools: list[dict[str, Any]] = field(default_factory=list)
    answer_schema: dict[str, Any] | None = None
    """The JSON schema of the answer, if the request names one."""

    def task(self, key: str | None) -> int:
        """Return the index of the task: the last user message with the key, or else the first one; -1 without any."""
        users = [index for index, message in enumerate(self.messages) if message.role == "user"]
        if key is None:
            return users[0] if users else -1
        return next((index for index in reversed(users) if key in self.messages[index].text), -1)

    def task_text(self, key: str | None) -> str:
        """Return the texts of user messages up to the task; agents send notes before it."""
        if key is not None and (index := self.task(key)) >= 0:
            return self.messages[index].text
        texts = []
        for message in self.messages:
            if message.role == "assistant":
                break
            if message.role == "user":
                texts.append(message.text)
        return "\n".join(texts)

    def answers_since(self, index: int) -> list[ScriptedMessage]:
        """Return the assistant's messages after an index."""
        return [message for message in self.messages[index + 1 :] if message.role == "assistant"]

    def last_result(self) -> str:
        """Return the text of the last tool result, or of the last user message."""
        for message in reversed(self.messages):
            if message.role in ("tool", "user"):
                return message.text
        return ""

    def folder(self) -> str:
        """Return the working folder from the agent's prompt, or "."."""
        texts = [message.text for message in self.messages if message.role in ("system", "user")]
        for pattern in _FOLDERS:
            for text in texts:
                if match := pattern.search(text):
                    return match.group(1)
        return "."


def canonical(arguments: Any) -> str:
    """Return arguments as canonical JSON, because agents parse and rewrite them."""
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments) if arguments.strip() else {}
        except ValueError:
            return str(arguments)
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def joined(messages: Iterable[ScriptedMessage]) -> list[ScriptedMessage]:
    """Merge neighbouring assistant messages, because some dialects send text and calls separately."""
    result: list[ScriptedMessage] = []
    for message in messages:
        if message.role == "assistant" and result and result[-1].role == "assistant":
            last = result[-1]
            result[-1] = ScriptedMessage(
                "assistant", "\n".join(filter(None, (last.text, message.text))), last.calls + message.calls
            )
        else:
            result.append(message)
    return result


def prompt_ids(conversation: ScriptedConversation, tokenizer: Tokenizer) -> list[int]:
    """Return the IDs of a conversation and of the token that starts the answer."""
    ids = [vocabulary.BEGIN]
    if conversation.tools:
        ids.append(vocabulary.TOOLS)
        ids.extend(tokenizer.encode(to_json(conversation.tools).decode()))
        ids.append(vocabulary.END)
    for message in conversation.messages:
        ids.append(_ROLE_TOKENS[message.role])
        if message.role == "assistant":
            ids.extend(answer_ids(message.text, message.calls, tokenizer))
        else:
            ids.extend(tokenizer.encode(message.text))
            ids.append(vocabulary.END)
    ids.append(vocabulary.ASSISTANT)
    return ids


def answer_ids(text: str, calls: Iterable[ScriptedToolCall], tokenizer: Tokenizer) -> list[int]:
    """Return the IDs of an answer including its end token."""
    ids = list(tokenizer.encode(text.strip()))
    for call in calls:
        ids.append(vocabulary.CALL)
        ids.extend(tokenizer.encode(call.name))
        ids.append(vocabulary.ARGUMENTS)
        ids.extend(tokenizer.encode(call.arguments))
    ids.append(vocabulary.END)
    return ids


Finish = Literal["stop", "tool_calls", "length"]

_PLACEHOLDER = re.compile(r"\$\{(cwd|task|result|turn|model|seed)(?::((?:[^{}]|\{\d+(?:,\d*)?\})*))?\}")
_REMEMBERED_ATTEMPTS = 10_000


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, and its visible part of the reply."""

    token: int
    logprob: float
    kind: Literal["text", "open", "arguments", "hidden"]
    """`open` completes the name of a call; `hidden` tokens are invisible."""
    visible: str = ""
    call: int = -1
    """The number of its call."""


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One whole reply, before it is written in a wire format."""

    script: Script
    turn: int
    """The number of the turn; -1 for a side answer, the number of turns for the ending."""
    calls: list[ScriptedToolCall]
    prompt_ids: list[int]
    steps: list[SampledToken]
    finish: Finish
    failure: Failure | None = None
    first_token_delay_s: float = 0.0
    token_delay_s: float = 0.0


@dataclass(slots=True)
class ScriptPlayer:
    """Several scripts, and the number of times each failure was played."""

    scripts: Sequence[Script]
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    _attempts: OrderedDict[tuple[str, int, str], int] = field(default_factory=OrderedDict)

    def choose(self, model: str, conversation: ScriptedConversation) -> Script:
        """Return the script for a request: by its model, else by a key in its messages, else the first script.

        A script with a key is played only if a user message contains the key.
        """
        name = model.rsplit(PREFIX, 1)[-1]
        for script in self.scripts:
            if script.name == name and (script.key is None or conversation.task(script.key) >= 0):
                return script
        keyed = [(at, script) for script in self.scripts if script.key and (at := conversation.task(script.key)) >= 0]
        if keyed:
            return max(keyed, key=lambda pair: pair[0])[1]
        return next((script for script in self.scripts if script.key is None), self.scripts[0])

    def answer(
        self, model: str, conversation: ScriptedConversation, *, max_tokens: int | None = None, seed: int | None = None
    ) -> ScriptedAnswer:
        """Return the next answer in a conversation.

        Args:
            model: The model in the request.
            max_tokens: The largest number of tokens in the answer.
            seed: The seed in the request, for the placeholder.
        """
        script = self.choose(model, conversation)
        ids = prompt_ids(conversation, self.tokenizer)
        number, turn = self._turn(script, conversation)
        filled = {
            "cwd": conversation.folder(),
            "task": conversation.task_text(script.key),
            "result": conversation.last_result(),
            "turn": str(number),
            "model": model,
            "seed": "" if seed is None else str(seed),
        }
        text = _filled(turn.text, filled).strip()
        place = sha256(to_json(ids)).hexdigest()[:16]
        calls = [_call(call, filled, f"call_{place}_{index}") for index, call in enumerate(turn.calls)]
        steps = _steps(text, calls, self.tokenizer, before=ids[-1])
        finish: Finish = "tool_calls" if calls else "stop"
        if max_tokens is not None and max_tokens < len(steps):
            steps, finish = steps[: max(max_tokens, 1)], "length"
        return ScriptedAnswer(
            script=script,
            turn=number,
            calls=calls,
            prompt_ids=ids,
            steps=steps,
            finish=finish,
            failure=self._failure(script, number, turn, place),
            first_token_delay_s=turn.first_token_delay_s,
            token_delay_s=turn.token_delay_s,
        )

    def _turn(self, script: Script, conversation: ScriptedConversation) -> tuple[int, Turn]:
        if script.calls_tools and not conversation.tools:
            return -1, Turn(text=_side_answer(script, conversation.answer_schema))
        number = 0
        for message in conversation.answers_since(conversation.task(script.key)):
            # an answer with fewer calls than its turn was cut off, so play the turn again
            if number < len(script.turns) and len(message.calls) >= len(script.turns[number].calls):
                number += 1
        if number < len(script.turns):
            return number, script.turns[number]
        return len(script.turns), Turn(text=script.ending)

    def _failure(self, script: Script, number: int, turn: Turn, seed: str) -> Failure | None:
        if not turn.failures:
            return None
        place = (script.name, number, seed)
        attempt = self._attempts.get(place, 0)
        self._attempts[place] = attempt + 1
        if len(self._attempts) > _REMEMBERED_ATTEMPTS:
            self._attempts.popitem(last=False)
        for failure in turn.failures:
            if failure.attempts is None or attempt < failure.attempts:
                return failure
            attempt -= failure.attempts
        return None


def _filled(text: str, values: dict[str, str]) -> str:
    def replace(placeholder: re.Match[str]) -> str:
        name, pattern = placeholder.groups()
        if pattern is None:
            return values[name]
        match = re.search(pattern, values[name])
        if match is None:
            return ""
        return match.group(1) if match.re.groups else match.group()

    return _PLACEHOLDER.sub(replace, text)


def _deeply_filled(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, str):
        return _filled(value, values)
    if isinstance(value, dict):
        return {key: _deeply_filled(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_deeply_filled(item, values) for item in value]
    return value


def _call(call: ScriptedCall, values: dict[str, str], call_id: str) -> ScriptedToolCall:
    if isinstance(call.arguments, str):
        return ScriptedToolCall(call.name, _filled(call.arguments, values), call_id, free_form=True)
    return ScriptedToolCall(call.name, canonical(_deeply_filled(call.arguments, values)), call_id)


def _side_answer(script: Script, schema: dict[str, Any] | None) -> str:
    if schema is None:
        return script.side_answer
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    empty: dict[str, Any] = {"boolean": False, "integer": 0, "number": 0, "array": [], "object": {}}
    kinds = {name: properties.get(name, {}).get("type", "string") for name in required}
    return canonical({name: empty.get(str(kind), script.side_answer) for name, kind in kinds.items()})


def _steps(text: str, calls: list[ScriptedToolCall], tokenizer: Tokenizer, *, before: int) -> list[SampledToken]:
    steps: list[SampledToken] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # an incomplete character waits for its other bytes
    call, in_name = -1, False
    for position, token in enumerate(answer_ids(text, calls, tokenizer)):
        chance = vocabulary.logprob(before, token, position)
        before = token
        if token == vocabulary.CALL:
            call, in_name = call + 1, True
            steps.append(SampledToken(token, chance, "hidden"))
        elif token == vocabulary.ARGUMENTS:
            in_name = False
            steps.append(SampledToken(token, chance, "open", call=call))
        elif token == vocabulary.END or in_name:
            steps.append(SampledToken(token, chance, "hidden", call=call))
        else:
            visible = decoder.decode(vocabulary.bytes_of(token))
            steps.append(SampledToken(token, chance, "text" if call < 0 else "arguments", visible, call))
    return steps
