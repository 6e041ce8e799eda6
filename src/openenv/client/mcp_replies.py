"""What servers answer to tool requests: lists, results and errors, of this release and of older ones.

Knows shapes; must not know how requests travel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import (
    OpenEnvError,
    ProtocolError,
    ServerError,
    ToolArgumentsError,
    ToolCallError,
    ToolNotFoundError,
    ToolTimeout,
    ToolTransportError,
)
from ..protocol.client_sessions import error_from_frame
from ..protocol.jsonrpc import JsonRpcErrorCode
from ..tool_types import Tool

_CLASSES: Mapping[str, type[ToolCallError]] = {
    cls.error_type: cls
    for cls in (ToolCallError, ToolArgumentsError, ToolTransportError, ToolNotFoundError, ToolTimeout)
}
_RESULT_KEYS = frozenset({"content", "data", "is_error"})
_OBSERVATION_KEYS = frozenset({"tool_name", "result", "error", "done"})
# What older servers say; they name no type.
_UNKNOWN = re.compile(r"Unknown tool\b|Tool '[^']*' not found", re.IGNORECASE)
_MISFIT = re.compile(r"\d+ validation errors? for call\[")
_NO_TOOLS = "does not support MCP"


def read_tools(items: Any) -> list[Tool]:
    """Read a list of tools; a tool may be without a description.

    Raises:
        ProtocolError: It is not one.
    """
    if not isinstance(items, list):
        raise ProtocolError(f"The server's list of tools is not a list: {str(items)[:200]}")
    return [_tool(item) for item in items]


def _tool(item: Any) -> Tool:
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
        raise ProtocolError(f"The server lists a tool without a name: {str(item)[:200]}")
    schema = item.get("input_schema", item.get("inputSchema"))
    return Tool(
        name=item["name"],
        description=str(item.get("description") or ""),
        input_schema=dict(schema) if isinstance(schema, Mapping) else {},
    )


def read_result(name: str, result: Any) -> Any:
    """Return what a tool returned: the data of a FastMCP result, or else its content; other results as they are.

    Raises:
        ToolCallError: The result says that the tool failed.
    """
    if not isinstance(result, Mapping):
        return result
    if result.keys() >= _OBSERVATION_KEYS:  # an environment that handles tools in its own step
        return read_observation(result, name)
    if not result.keys() >= _RESULT_KEYS:
        return result
    content = result["content"] if isinstance(result["content"], list) else []
    if result["is_error"]:
        raise tool_error(name, _text(content) or "the tool reports an error", None)
    if result["data"] is not None or result.get("structured_content") is not None:
        return result["data"]
    return _only_content(content)


def _only_content(content: list[Any]) -> Any:
    """A tool that declares no result has only blocks: their text, or the blocks where they are more than text."""
    if all(isinstance(block, Mapping) and block.get("type") == "text" for block in content):
        return _text(content) if content else None
    return content


def _text(content: list[Any]) -> str:
    return "\n".join(str(block["text"]) for block in content if isinstance(block, Mapping) and block.get("text"))


def read_observation(observation: Mapping[str, Any], name: str) -> Any:
    """Return what a tool returned in a step.

    Raises:
        ToolCallError: The observation says that it failed; the class follows its type.
    """
    error = observation.get("error")
    if isinstance(error, Mapping):
        raise tool_error(name, str(error.get("message", "")), error.get("error_type"))
    if error:
        raise tool_error(name, str(error), None)
    return read_result(name, observation.get("result"))


def tool_error(name: str, message: str, error_type: Any) -> ToolCallError:
    """Build the exception of a failed call; without a type, the words of older servers tell it."""
    cls = _CLASSES.get(error_type) if isinstance(error_type, str) else None
    if cls is None:
        cls = ToolNotFoundError if _UNKNOWN.match(message) else ToolCallError
        cls = ToolArgumentsError if _MISFIT.match(message) else cls
    text = f"Tool '{name}' failed: {message}"
    if cls is ToolNotFoundError and "not found" not in message.lower():
        text = f"Tool '{name}' failed: not found ({message})"
    return cls(name, text)


def rpc_error(error: Any, tool_name: str | None) -> OpenEnvError:
    """Build the exception of a JSON-RPC error, for a call or else for a list."""
    found: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": str(error)}
    message, data = str(found.get("message", "unknown error")), found.get("data")
    details = data if isinstance(data, Mapping) else {}
    if isinstance(details.get("code"), str):  # what went wrong is not the tool
        return error_from_frame({**details, "message": message})
    if tool_name is None:
        return ServerError(f"list_tools failed: {message}", details=details)
    if _NO_TOOLS in message:
        return tool_error(tool_name, message, ToolTransportError.error_type)
    return tool_error(tool_name, message, details.get("error_type"))


def knows_no_tools(error: Any) -> bool:
    """Whether an error says that tools cannot be asked for this way; those of older servers may be steps."""
    if not isinstance(error, Mapping) or error.get("data") is not None:
        return False
    return error.get("code") == JsonRpcErrorCode.METHOD_NOT_FOUND.value or _NO_TOOLS in str(error.get("message", ""))


def listed_observation(payload: Mapping[str, Any]) -> list[Tool]:
    """Read the observation of a step that lists tools.

    Raises:
        ServerError: The environment could not list them.
        ProtocolError: It is another observation.
    """
    observation = payload.get("observation")
    if not isinstance(observation, Mapping) or "tools" not in observation:
        raise ProtocolError(f"The environment answered a list of tools with {str(observation)[:200]}")
    metadata = observation.get("metadata") or payload.get("metadata")
    if not observation["tools"] and isinstance(metadata, Mapping) and metadata.get("error"):
        raise ServerError(f"list_tools failed: {metadata['error']}", details=metadata)
    return read_tools(observation["tools"])
