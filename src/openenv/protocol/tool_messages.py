"""Tools as data: the actions and observations that list and call them.

Knows the shared types only; running tools belongs to `env`, JSON-RPC to `protocol.jsonrpc`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from openenv.types import Action, Observation

RESERVED_TOOL_NAMES = frozenset({"reset", "step", "state", "close"})


class Tool(BaseModel):
    """A tool's name, purpose and argument schema."""

    model_config = ConfigDict(extra="forbid")

    name: str
    description: str
    input_schema: dict[str, Any]


class ToolErrorType(str, Enum):
    """Why a tool call failed."""

    EXECUTION_ERROR = "execution_error"
    INVALID_ARGS = "invalid_args"
    TRANSPORT_ERROR = "transport_error"
    TOOL_NOT_FOUND = "tool_not_found"
    TIMEOUT = "timeout"


class ToolError(BaseModel):
    """A failed tool call."""

    model_config = ConfigDict(extra="forbid")

    error_type: ToolErrorType
    message: str


class ListToolsAction(Action):
    """Ask for the tools of an environment."""

    type: Literal["list_tools"] = "list_tools"


class CallToolAction(Action):
    """Call one tool of an environment."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ListToolsObservation(Observation):
    """The tools of an environment."""

    tools: list[Tool]


class CallToolObservation(Observation):
    """A tool's result, or why the call failed."""

    tool_name: str
    result: Any = None
    error: ToolError | None = None
