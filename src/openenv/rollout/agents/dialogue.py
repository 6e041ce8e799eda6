"""Dialogues between a language model and an environment: observations become messages, replies become actions."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from openenv.client.llm_client import arguments_of, mcp_tools_to_openai

Json = dict[str, Any]

FRAME_FIELDS = frozenset({"done", "reward", "metadata", "terminated", "truncated", "render"})
"""Fields of an observation for the trainer, hidden from the player."""


class AnswerRefused(ValueError):
    """The model's reply contains no valid action; the model reads the text."""


class Dialogue(ABC):
    """Turns observations into messages and replies into actions. Stateless: one object serves all episodes."""

    tools: Sequence[Json] = ()
    """The tools of each request, in the format of chat completions."""

    @abstractmethod
    def opening(self, observation: Any) -> list[Json]:
        """Return the first messages of an episode."""

    @abstractmethod
    def actions(self, answer: Json) -> list[Json]:
        """Return the actions of an assistant message in order; an empty list if the model ends the episode.

        Raises:
            AnswerRefused: the message has no valid action; the model reads the text and may reply again.
        """

    @abstractmethod
    def reply(self, answer: Json, results: Sequence[str]) -> list[Json]:
        """Return the messages after a reply: the results of its actions, or the reason why it was refused."""

    def shown(self, observation: Any) -> str:
        """Return an observation as text: its only text field, or else all fields as JSON."""
        if not isinstance(observation, Mapping):
            return str(observation)
        fields = {name: value for name, value in observation.items() if name not in FRAME_FIELDS}
        texts = [value for value in fields.values() if isinstance(value, str) and value]
        return texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)


class TextDialogue(Dialogue):
    """For environments with typed actions: observations and replies are texts.

    Args:
        system: The system message.
        action_schema: The JSON schema of actions from `/schema`. If the action has one text field, the whole reply
            becomes the action; otherwise the first JSON object in the reply is used.
    """

    def __init__(self, system: str = "", action_schema: Mapping[str, Any] | None = None) -> None:
        self.system = system
        fields = {
            name: field
            for name, field in ((action_schema or {}).get("properties") or {}).items()
            if name != "metadata" and "const" not in field
        }
        texts = [name for name, field in fields.items() if field.get("type") == "string" and "enum" not in field]
        self._text_field = texts[0] if len(fields) == len(texts) == 1 else None
        self._request = "Answer with a JSON object" + (f" with these fields: {', '.join(fields)}." if fields else ".")

    def opening(self, observation: Any) -> list[Json]:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, {"role": "user", "content": self.shown(observation)}]

    def actions(self, answer: Json) -> list[Json]:
        return [self.action(str(answer.get("content") or ""))]

    def action(self, text: str) -> Json:
        """Return the action in a text; override this for another notation.

        Raises:
            AnswerRefused: the text contains no action.
        """
        if self._text_field is not None:
            return {self._text_field: text.strip()}
        start = text.find("{")
        try:
            value, _ = json.JSONDecoder().raw_decode(text[start:] if start >= 0 else text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise AnswerRefused(self._request)
        return value

    def reply(self, answer: Json, results: Sequence[str]) -> list[Json]:
        return [{"role": "user", "content": "\n".join(results)}]


class ToolDialogue(Dialogue):
    """For environments with tools: the model calls them. A reply without a call ends the episode.

    Args:
        tools: The tools as the environment lists them.
        system: The system message.
        prompt: The first message; by default the first observation.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], system: str = "", prompt: str = "") -> None:
        self.tools = mcp_tools_to_openai(tools)
        self.system = system
        self.prompt = prompt

    def opening(self, observation: Any) -> list[Json]:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, {"role": "user", "content": self.prompt or self.shown(observation)}]

    def actions(self, answer: Json) -> list[Json]:
        calls = [call["function"] for call in answer.get("tool_calls") or []]
        try:
            arguments = [arguments_of(call.get("arguments")) for call in calls]
        except ValueError as exc:
            raise AnswerRefused(f"Error: the arguments are no JSON: {exc}") from None
        return [
            {"type": "call_tool", "tool_name": call["name"], "arguments": each}
            for call, each in zip(calls, arguments, strict=True)
        ]

    def reply(self, answer: Json, results: Sequence[str]) -> list[Json]:
        calls = answer.get("tool_calls") or []
        # Every call needs a result. One reason may apply to all calls, and an episode may end before its last call.
        texts = [*results, *[results[-1]] * (len(calls) - len(results))] if results else []
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=False)
        ]

    def shown(self, observation: Any) -> str:
        """Return the result of a tool, or its error."""
        return _tool_result(observation) or super().shown(observation)


class WrittenToolDialogue(TextDialogue):
    """For environments with tools, and models without tool calls: a call is a JSON object in the reply.

    Args:
        tools: The tools as the environment lists them; the first message names them.
        system: The system message.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], system: str = "") -> None:
        super().__init__(system)
        listed = [tool["function"] for tool in mcp_tools_to_openai(tools)]
        self._request = 'Call a tool with a JSON object: {"tool_name": ..., "arguments": {...}}.'
        self._tools_text = f"{self._request} The tools: {json.dumps(listed, ensure_ascii=False)}"

    def opening(self, observation: Any) -> list[Json]:
        *begin, first = super().opening(observation)
        shown = "" if first["content"] == "{}" else f"{first['content']}\n\n"
        return [*begin, {"role": "user", "content": shown + self._tools_text}]

    def action(self, text: str) -> Json:
        """Return the call in a text.

        Raises:
            AnswerRefused: the text contains no call.
        """
        call = super().action(text)
        name, arguments = call.get("tool_name") or call.get("name"), call.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise AnswerRefused(self._request)
        return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}

    def shown(self, observation: Any) -> str:
        """Return the result of a tool, or its error."""
        return _tool_result(observation) or super().shown(observation)


def conversation_of(prompt: Sequence[Json], opening: Sequence[Json]) -> list[Json]:
    """Return the first messages of an episode: a dataset's prompt, then the dialogue's opening.

    The system message comes first, once. The prompt's takes precedence over the dialogue's.

    Raises:
        ValueError: the prompt has several system messages.
    """
    own = [message for message in prompt if message.get("role") == "system"]
    if len(own) > 1:
        raise ValueError(f"the prompt of a row has {len(own)} system messages: combine them into one")
    messages = [*prompt, *opening]
    system = [message for message in messages if message.get("role") == "system"]
    return [*system[:1], *(message for message in messages if message.get("role") != "system")]


def _tool_result(observation: Any) -> str | None:
    """Return the result or the error of a tool as text; None if the observation has neither."""
    if not isinstance(observation, Mapping) or "tool_name" not in observation:
        return None
    error = observation.get("error")
    result = observation.get("result")
    if isinstance(result, Mapping) and "data" in result:  # as MCP wraps it
        result = result["data"]
    if error:
        return f"Error: {error.get('message') if isinstance(error, Mapping) else error}"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
