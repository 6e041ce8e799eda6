"""A conversation as every dialect has it: who said what, which tools were called, and the ids of all of it.

Knows nothing of wire formats. The template is that of no real model, but behaves like one: the ids of a prompt are
those of the prompt before it, its answer, and what came since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json, to_json

from ...testing.scripted import vocabulary
from ...testing.scripted.vocabulary import Tokenizer

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
class Call:
    """A tool call with its arguments as text: canonical JSON, or the input of a free-form tool."""

    name: str
    arguments: str
    call_id: str = ""
    free_form: bool = False


@dataclass(slots=True)
class Message:
    """What one side said."""

    role: Role
    text: str = ""
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Conversation:
    """What a request asks to be continued."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    answer_schema: dict[str, Any] | None = None
    """The JSON schema that the answer has to follow, where the request names one."""

    def task(self, key: str | None) -> int:
        """Return where the task is: the last user message with the key, or the first one; -1 if there is none."""
        users = [index for index, message in enumerate(self.messages) if message.role == "user"]
        if key is None:
            return users[0] if users else -1
        return next((index for index in reversed(users) if key in self.messages[index].text), -1)

    def task_text(self, key: str | None) -> str:
        """Return what the users said up to the task: agents send notes of their own before it."""
        if key is not None and (found := self.task(key)) >= 0:
            return self.messages[found].text
        texts = []
        for message in self.messages:
            if message.role == "assistant":
                break
            if message.role == "user":
                texts.append(message.text)
        return "\n".join(texts)

    def answers_since(self, index: int) -> list[Message]:
        """Return the assistant's messages after an index."""
        return [message for message in self.messages[index + 1 :] if message.role == "assistant"]

    def last_result(self) -> str:
        """Return the text of the last tool result, or of the last user message."""
        for message in reversed(self.messages):
            if message.role in ("tool", "user"):
                return message.text
        return ""

    def folder(self) -> str:
        """Return the folder that the agent says it works in, or "." where it says nothing."""
        told = [message.text for message in self.messages if message.role in ("system", "user")]
        for pattern in _FOLDERS:
            for text in told:
                if found := pattern.search(text):
                    return found.group(1)
        return "."


def canonical(arguments: Any) -> str:
    """Return arguments as JSON in one spelling: agents parse what they get and write it anew."""
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments) if arguments.strip() else {}
        except ValueError:
            return str(arguments)
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def joined(messages: Iterable[Message]) -> list[Message]:
    """Make one message of neighbouring ones of the assistant: some dialects send text and calls apart."""
    result: list[Message] = []
    for message in messages:
        if message.role == "assistant" and result and result[-1].role == "assistant":
            last = result[-1]
            result[-1] = Message(
                "assistant", "\n".join(filter(None, (last.text, message.text))), last.calls + message.calls
            )
        else:
            result.append(message)
    return result


def prompt_ids(conversation: Conversation, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a conversation and of the token that begins the answer."""
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


def answer_ids(text: str, calls: Iterable[Call], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of an answer, the token that ends it included."""
    ids = list(tokenizer.encode(text.strip()))
    for call in calls:
        ids.append(vocabulary.CALL)
        ids.extend(tokenizer.encode(call.name))
        ids.append(vocabulary.ARGUMENTS)
        ids.extend(tokenizer.encode(call.arguments))
    ids.append(vocabulary.END)
    return ids
