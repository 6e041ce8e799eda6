"""Dialogues between a language model and an environment: observations become messages, replies become actions.

The first message has the environment's description, the form of its actions and the first observation. An environment
decides more itself: with `to_prompt()` of its observations, and with `PROMPT_TEMPLATE`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openenv.client.llm_client import arguments_of, mcp_tools_to_openai
from openenv.protocol.json_values import PROMPT_KEY
from openenv.protocol.schema import resolve_reference

Json = dict[str, Any]

FRAME_FIELDS = frozenset({"done", "reward", "metadata", "terminated", "truncated", "render"})
"""Fields of an observation for the trainer, hidden from the player."""


_PLACES = ("description", "actions", "observation")
_HIDDEN_FIELDS = frozenset({"metadata"})
"""Fields of actions that are not for the player."""


class AnswerRefused(ValueError):
    """The model's reply contains no valid action; the model reads the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The form of an episode's messages.

    Raises:
        ValueError: The template has no place for the observation.
    """

    description: str = ""
    """The environment's description."""
    template: str = ""
    """The first message, with `{description}`, `{actions}` and `{observation}`; empty to join them with blank lines."""
    text_only: bool = False
    """Whether the model reads only the observation's text: no description, no form of actions, no other fields."""

    def __post_init__(self) -> None:
        if self.template and "{observation}" not in self.template:
            raise ValueError("the template needs {observation}; it may also have {description} and {actions}")

    def opening(self, actions: str, observation: str) -> str:
        """Return the first message of an episode.

        Args:
            actions: The form of the actions.
            observation: The first observation as text.
        """
        if self.text_only:
            return observation
        parts = dict(zip(_PLACES, (self.description, actions, observation), strict=True))
        if not self.template:
            return "\n\n".join(part for part in parts.values() if part) or "The episode has begun."
        text = self.template
        for place in _PLACES:  # the observation last: text in it is no place
            text = text.replace("{" + place + "}", parts[place])
        return text


class Dialogue(ABC):
    """Turns observations into messages and replies into actions. Stateless: one object serves all episodes."""

    tools: Sequence[Json] = ()
    """The tools of each request, in the format of chat completions."""
    prompt_form: Prompt = Prompt()
    """The form of the messages."""

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
        """Return an observation as text: what its `to_prompt()` returned, or all its fields by name.

        A single text field is shown without its name. Empty texts and None are left out.
        """
        if not isinstance(observation, Mapping):
            return str(observation)
        metadata = observation.get("metadata")
        if isinstance(metadata, Mapping) and isinstance(metadata.get(PROMPT_KEY), str):
            return str(metadata[PROMPT_KEY])
        fields = {name: value for name, value in observation.items() if name not in FRAME_FIELDS and value is not None}
        fields = {name: value for name, value in fields.items() if value != ""}
        texts = [value for value in fields.values() if isinstance(value, str)]
        if len(texts) == 1 and (self.prompt_form.text_only or len(fields) == 1):
            return texts[0]
        if self.prompt_form.text_only:
            return json.dumps(fields, ensure_ascii=False)
        return "\n".join(_named(name, value) for name, value in fields.items())


def _named(name: str, value: Any) -> str:
    """Return a field with its name: `guesses: [3, 5]`; a text of several lines, such as a board, below its name."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{name}:\n{text}" if "\n" in text else f"{name}: {text}"


class TextDialogue(Dialogue):
    """For environments with typed actions: observations and replies are texts.

    Args:
        system: The system message.
        action_schema: The JSON schema of actions from `/schema`. If the action has one text field, the whole reply
            becomes the action, or the field of a JSON object that is the whole reply; otherwise the first JSON object
            in the reply is used.
        prompt: The form of the messages; by default without a description.
    """

    def __init__(
        self, system: str = "", action_schema: Mapping[str, Any] | None = None, prompt: Prompt | None = None
    ) -> None:
        self.system = system
        self.prompt_form = prompt or Prompt()
        schema = action_schema or {}
        fields = _free_fields(schema)
        texts = [name for name, field in fields.items() if field.get("type") == "string" and "enum" not in field]
        self._text_field = texts[0] if len(fields) == len(texts) == 1 else None
        self._request = describe_actions(schema)

    def opening(self, observation: Any) -> list[Json]:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, {"role": "user", "content": self.prompt_form.opening(self._request, self.shown(observation))}]

    def actions(self, answer: Json) -> list[Json]:
        return [self.action(str(answer.get("content") or ""))]

    def action(self, text: str) -> Json:
        """Return the action in a text; override this for another notation.

        Raises:
            AnswerRefused: the text contains no action.
        """
        if self._text_field is not None:
            return {self._text_field: _unwrapped(text.strip(), self._text_field)}
        start = text.find("{")
        try:
            value, _ = json.JSONDecoder().raw_decode(text[start:] if start >= 0 else text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise AnswerRefused(self._request)
        return value

    def reply(self, answer: Json, results: Sequence[str]) -> list[Json]:
        return [{"role": "user", "content": "\n".join(results) or "The observation is empty."}]


def _unwrapped(text: str, field: str) -> str:
    """Return the field of a reply such as `{"guess": "crane"}`; every other reply as it is."""
    if not text.startswith("{"):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value[field] if value.keys() == {field} and isinstance(value[field], str) else text


# ---- the form of actions, in words ----
#
#   one text field      Your whole reply becomes the action's `guess`: five letters, for example crane.
#   other fields        Answer with one JSON object with these fields:
#                       - row (integer, 0 to 2): The row.
#                       - piece ("x" or "o", optional)
#   a union             Answer with one JSON object, in one of these forms:
#                       Move: Go somewhere.
#                       - kind ("move")
#                       - to (string)


def describe_actions(schema: Mapping[str, Any]) -> str:
    """Return the form of a model's replies for a JSON schema of actions."""
    members = schema.get("oneOf") or schema.get("anyOf")
    if members:
        forms = [_form(resolve_reference(member, schema), schema) for member in members]
        return "\n".join(["Answer with one JSON object, in one of these forms:", *forms])
    fields = _free_fields(schema)
    if not fields:
        return "Answer with a JSON object."
    if len(fields) == 1:
        ((name, field),) = fields.items()
        if field.get("type") == "string" and "enum" not in field:
            about = f": {field['description']}".rstrip(".") if field.get("description") else ""
            return f"Your whole reply becomes the action's `{name}`{about}{_form_of_text(field, quote=str)}."
    return "\n".join(["Answer with one JSON object with these fields:", *_field_lines(fields, schema)])


def _free_fields(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the fields of actions that the player decides."""
    fields = schema.get("properties") or {}
    return {name: field for name, field in fields.items() if name not in _HIDDEN_FIELDS and "const" not in field}


def _form(member: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    about = " ".join(str(member.get("description") or "").split())
    title = f"{member.get('title', 'Action')}: {about}" if about else f"{member.get('title', 'Action')}:"
    fields = {name: field for name, field in (member.get("properties") or {}).items() if name not in _HIDDEN_FIELDS}
    return "\n".join([title, *_field_lines(fields, {**schema, **member})])


def _field_lines(fields: Mapping[str, Mapping[str, Any]], schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required") or ()
    for name, field in fields.items():
        kind = _kind(resolve_reference(field, schema), schema)
        # A discriminator has a default in pydantic's schema, but the server needs it to choose the form.
        optional = "" if name in required or "const" in field else ", optional"
        about = " ".join(str(field.get("description") or "").split())
        yield f"- {name} ({kind}{optional})" + (f": {about}" if about else "")


def _kind(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return a field's type in words: `integer, 0 to 2`, `"x" or "o"`, `array of integer`."""
    if "const" in field:
        return json.dumps(field["const"], ensure_ascii=False)
    if "enum" in field:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in field["enum"])
    members = field.get("anyOf") or field.get("oneOf")
    if members:
        return " or ".join(dict.fromkeys(_kind(resolve_reference(one, schema), schema) for one in members))
    kind = str(field.get("type") or "any value")
    if kind == "array" and isinstance(field.get("items"), Mapping):
        kind = f"array of {_kind(resolve_reference(field['items'], schema), schema)}"
    if kind == "object" and field.get("properties"):
        inner = {name: _kind(resolve_reference(one, schema), schema) for name, one in field["properties"].items()}
        kind = "object with " + ", ".join(f"{name} ({each})" for name, each in inner.items())
    return kind + (_form_of_text(field, quote=json.dumps) if kind == "string" else _limits(field))


def _form_of_text(field: Mapping[str, Any], quote: Callable[[Any], str]) -> str:
    """Return an example of a text, or else the pattern that it must match."""
    examples = field.get("examples")
    if isinstance(examples, list) and examples:
        return f", for example {quote(examples[0])}"
    return f", matching {field['pattern']}" if "pattern" in field else ""


def _limits(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f", {low} to {high}"
    if low is not None:
        return f", at least {low}"
    return "" if high is None else f", at most {high}"


class ToolDialogue(Dialogue):
    """For environments with tools: the model calls them. A reply without a call ends the episode.

    Args:
        tools: The tools as the environment lists them.
        system: The system message.
        prompt: The form of the messages, or the text of the first one.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], system: str = "", prompt: Prompt | str | None = None
    ) -> None:
        self.tools = mcp_tools_to_openai(tools)
        self.system = system
        self.prompt = prompt if isinstance(prompt, str) else ""
        self.prompt_form = prompt if isinstance(prompt, Prompt) else Prompt()

    def opening(self, observation: Any) -> list[Json]:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, {"role": "user", "content": self.prompt or self._first(observation)}]

    def _first(self, observation: Any) -> str:
        # The request itself has the tools.
        return self.prompt_form.opening("", self.shown(observation)) or "The episode has begun."

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
        prompt: The form of the messages; by default without a description.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], system: str = "", prompt: Prompt | None = None) -> None:
        super().__init__(system, prompt=prompt)
        listed = [tool["function"] for tool in mcp_tools_to_openai(tools)]
        self._request = 'Call a tool with a JSON object: {"tool_name": ..., "arguments": {...}}.'
        self._tools_text = f"{self._request} The tools: {json.dumps(listed, ensure_ascii=False)}"

    def opening(self, observation: Any) -> list[Json]:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        form = self.prompt_form
        if form.text_only:  # without the tools the model could do nothing
            form = Prompt(template=form.template)
        return [*begin, {"role": "user", "content": form.opening(self._tools_text, self.shown(observation))}]

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
