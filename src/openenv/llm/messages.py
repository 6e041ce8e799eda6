"""Messages and tools of language models, from one provider's shape to another's.

Pure. Conversations are in OpenAI's shape, tools in MCP's, wherever nothing else is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class ToolCall:
    """A tool call that a model asks for."""

    id: str
    name: str
    args: Json


@dataclass
class LLMResponse:
    """What a model said: a text, tool calls, or both."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_message_dict(self) -> Json:
        """Return the answer as a message of OpenAI's shape, to be added to the conversation."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.args)}}
                for call in self.tool_calls
            ]
        return message


def clean_mcp_schema(schema: Any) -> Json:
    """Return a tool's schema as model providers accept it: an object at the top, no alternatives there.

    Of alternatives, the first that is an object is taken; parts of an `allOf` become one.
    """
    if not isinstance(schema, Mapping):
        return {"type": "object", "properties": {}, "required": []}
    cleaned = dict(schema)
    for kind in ("oneOf", "anyOf"):
        variants = cleaned.pop(kind, None)
        if variants:
            objects = [one for one in variants if isinstance(one, Mapping) and _is_object(one)]
            cleaned = {**cleaned, **(objects[0] if objects else {})}
    parts = cleaned.pop("allOf", None)
    if parts:
        cleaned = _merged(cleaned, parts)
    if cleaned.setdefault("type", "object") == "object":
        cleaned.setdefault("properties", {})
    return cleaned


def mcp_tools_to_openai(mcp_tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return tools as OpenAI's chat completions take them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": clean_mcp_schema(_schema(tool)),
            },
        }
        for tool in mcp_tools
    ]


def mcp_tools_to_anthropic(mcp_tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return tools as Anthropic's messages take them."""
    return [
        {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "input_schema": clean_mcp_schema(_schema(tool)),
        }
        for tool in mcp_tools
    ]


def openai_messages_to_anthropic(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Json]]:
    """Return the system's text and the other messages as Anthropic takes them; results of tools are the user's."""
    system: list[str] = []
    turned: list[Json] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            system.append(content or "")
        elif role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id", ""), "content": content or ""}
            if turned and _holds_results(turned[-1]):
                turned[-1]["content"].append(block)
            else:
                turned.append({"role": "user", "content": [block]})
        elif role == "assistant" and message.get("tool_calls"):
            blocks: list[Json] = [{"type": "text", "text": content}] if content else []
            blocks += [_tool_use(call) for call in message["tool_calls"]]
            turned.append({"role": "assistant", "content": blocks})
        else:
            turned.append({"role": role, "content": content})
    return "\n\n".join(system), turned


def arguments_of(text: Any) -> Json:
    """Return a call's arguments, which come as JSON; none at all is an empty object.

    Raises:
        json.JSONDecodeError: The model wrote no JSON.
    """
    if isinstance(text, Mapping):
        return dict(text)
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {"value": value}


def _schema(tool: Mapping[str, Any]) -> Any:
    return tool.get("inputSchema", tool.get("input_schema"))


def _is_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object" or "properties" in schema


def _merged(base: Json, parts: Sequence[Any]) -> Json:
    merged = dict(base)
    properties, required = dict(base.get("properties", {})), list(base.get("required", []))
    for part in parts:
        if isinstance(part, Mapping):
            properties.update(part.get("properties", {}))
            required += [name for name in part.get("required", []) if name not in required]
    merged.update(type="object", properties=properties)
    if required:
        merged["required"] = required
    return merged


def _holds_results(message: Json) -> bool:
    content = message["content"]
    return message["role"] == "user" and isinstance(content, list) and content[-1].get("type") == "tool_result"


def _tool_use(call: Mapping[str, Any]) -> Json:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": arguments_of(function["arguments"]),
    }
