"""Messages, tools and answers between chat completions and Inspect AI. Needs inspect-ai."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openenv.client.llm_client import arguments_of
from openenv.errors import install_command
from openenv.rollout.capture.transcript import TranscriptMessage, TranscriptPart

try:
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentImage,
        ContentReasoning,
        ContentText,
    )
    from inspect_ai.tool import ToolCall, ToolFunction, ToolInfo, ToolParams
except ImportError as exc:
    raise ModuleNotFoundError(f"inspect-ai is required: {install_command('inspect')}", name=exc.name) from exc

Json = dict[str, Any]

_FINISH = {"stop": "stop", "tool_calls": "tool_calls", "max_tokens": "length", "model_length": "length"}
"""Stop reasons of Inspect, as chat completions call them; a refusal is `content_filter`."""
_STOP = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "length": "max_tokens",
    "max_tokens": "max_tokens",
    "content_filter": "content_filter",
    "refusal": "content_filter",
}
"""Finish reasons of the three dialects, as Inspect calls them."""


# -- chat completions to Inspect --------------------------------------------------------------------------------------


def to_inspect_messages(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return messages of a chat completion as Inspect has them."""
    # Results carry only the call's ID; Inspect also wants the tool's name.
    names: dict[str, str] = {}
    converted = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = str((call.get("function") or {}).get("name"))
        converted.append(_to_inspect_message(message, names))
    return converted


def _to_inspect_message(message: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    role, content = message.get("role"), _to_content(message.get("content"))
    # Newer OpenAI models call the system message `developer`.
    if role in ("system", "developer"):
        return ChatMessageSystem(content=content)
    if role == "assistant":
        return to_inspect_answer(message)
    if role in ("tool", "function"):
        call_id = str(message.get("tool_call_id") or "")
        return ChatMessageTool(content=content, tool_call_id=call_id, function=names.get(call_id))
    return ChatMessageUser(content=content)


def to_inspect_answer(message: Mapping[str, Any], model: str | None = None) -> Any:
    """Return a message of the assistant as Inspect has it."""
    content = _to_content(message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    # Servers use either name for the reasoning.
    if isinstance(reasoning, str) and reasoning:
        texts = [ContentText(text=content)] if isinstance(content, str) else content
        content = [ContentReasoning(reasoning=reasoning), *texts]
    calls = [_to_tool_call(call) for call in message.get("tool_calls") or ()]
    return ChatMessageAssistant(content=content, tool_calls=calls or None, model=model)


def _to_tool_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or {}
    try:
        arguments, problem = arguments_of(function.get("arguments")), None
    except ValueError as exc:
        # Kept as a parse error, so that the solver can show it to the model.
        arguments, problem = {}, f"the arguments are no JSON: {exc}"
    name = str(function.get("name") or "")
    return ToolCall(id=str(call.get("id") or ""), function=name, arguments=arguments, parse_error=problem)


def _to_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return [_to_part(part) for part in content]


def _to_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return ContentText(text=str(part.get("text") or ""))
    if kind == "image_url":
        return ContentImage(image=str((part.get("image_url") or {}).get("url") or ""))
    # Unknown parts become text: a log should lose nothing.
    return ContentText(text=part if isinstance(part, str) else json.dumps(part, ensure_ascii=False))


def to_inspect_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the tools of a chat completion as Inspect has them."""
    # Built-in tools of a provider have no function and cannot be called here.
    functions = [tool.get("function") or {} for tool in tools if tool.get("type", "function") == "function"]
    return [
        ToolInfo(
            name=str(function.get("name")),
            description=str(function.get("description") or function.get("name")),
            parameters=ToolParams.model_validate({**(function.get("parameters") or {}), "type": "object"}),
        )
        for function in functions
    ]


def to_inspect_tool_choice(choice: Any) -> Any:
    """Return a tool choice as Inspect has it."""
    if isinstance(choice, dict):
        return ToolFunction(name=str((choice.get("function") or {}).get("name")))
    return {"required": "any", "none": "none"}.get(str(choice), "auto")


def transcript_to_inspect(messages: Iterable[TranscriptMessage]) -> list[Any]:
    """Return captured messages of any dialect as Inspect has them."""
    names: dict[str, str] = {}
    converted: list[Any] = []
    for message in messages:
        # Calls come before their results, so one pass suffices.
        names.update((part.call_id, part.name) for part in message.parts if part.kind == "call")
        results = [part for part in message.parts if part.kind == "result"]
        content = [_from_part(part) for part in message.parts if part.kind not in ("call", "result")]
        for part in results:
            name = part.name or names.get(part.call_id)
            converted.append(ChatMessageTool(content=part.text, tool_call_id=part.call_id, function=name))
        if message.role == "assistant":
            calls = [_part_to_call(part) for part in message.parts if part.kind == "call"]
            converted.append(ChatMessageAssistant(content=_plain(content), tool_calls=calls or None))
        # A message of results alone is complete already.
        elif content or not results:
            kind = ChatMessageSystem if message.role == "system" else ChatMessageUser
            converted.append(kind(content=_plain(content)))
    return converted


def _from_part(part: TranscriptPart) -> Any:
    if part.kind == "image":
        return ContentImage(image=part.text)
    if part.kind == "reasoning":
        # Providers encrypt reasoning; what remains is empty.
        return ContentReasoning(reasoning=part.text, redacted=not part.text)
    return ContentText(text=part.text if part.kind == "text" else f"[{part.name}] {part.text}")


def _part_to_call(part: TranscriptPart) -> Any:
    return _to_tool_call({"id": part.call_id, "function": {"name": part.name, "arguments": part.text}})


def _plain(content: list[Any]) -> Any:
    """Return content of a single text as that text."""
    if not content:
        return ""
    return content[0].text if len(content) == 1 and content[0].type == "text" else content


def stop_reason(finish_reason: str | None) -> Any:
    """Return a finish reason as Inspect has it."""
    return _STOP.get(str(finish_reason), "unknown")


# -- Inspect to chat completions --------------------------------------------------------------------------------------


def from_inspect_message(message: Any) -> Json:
    """Return a message of Inspect as chat completions have it."""
    if message.role == "assistant":
        return from_inspect_answer(message)
    document: Json = {"role": message.role, "content": _from_content(message.content)}
    if message.role == "tool":
        document["tool_call_id"] = message.tool_call_id or ""
        # The model must see that its call failed.
        if message.error is not None and not message.text:
            document["content"] = f"Error: {message.error.message}"
    return document


def from_inspect_answer(message: Any) -> Json:
    """Return the assistant's message as chat completions have it."""
    # Chat completions have the text of the answer as one string.
    document: Json = {"role": "assistant", "content": message.text}
    parts = message.content if isinstance(message.content, list) else []
    reasoning = "\n".join(part.reasoning for part in parts if part.type == "reasoning" and not part.redacted)
    if reasoning:
        document["reasoning_content"] = reasoning
    if message.tool_calls:
        document["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return document


def _from_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts: list[Json] = []
    for part in content:
        if part.type == "image":
            parts.append({"type": "image_url", "image_url": {"url": part.image}})
        elif part.type in ("text", "reasoning"):
            parts.append({"type": "text", "text": part.text if part.type == "text" else part.reasoning})
        else:
            parts.append({"type": "text", "text": f"[{part.type}]"})
    return parts


def from_inspect_tool(tool: Any) -> Json:
    """Return a tool of Inspect as chat completions have it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters.model_dump(exclude_none=True),
    }
    return {"type": "function", "function": function}


def from_inspect_output(output: Any) -> Json:
    """Return an answer of a model as the response of a chat completion."""
    # Mock models report no usage.
    usage = output.usage
    sent, sampled = (0, 0) if usage is None else (usage.input_tokens, usage.output_tokens)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": output.model,
        "choices": [
            {
                "index": number,
                "message": from_inspect_answer(choice.message),
                "finish_reason": "tool_calls"
                if choice.message.tool_calls
                else _FINISH.get(choice.stop_reason, "content_filter"),
            }
            for number, choice in enumerate(output.choices)
        ],
        "usage": {"prompt_tokens": sent, "completion_tokens": sampled, "total_tokens": sent + sampled},
    }
