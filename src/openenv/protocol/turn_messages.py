"""Messages of `WS /harness`: the text of a turn, the events of the agent, and the reply to an invalid frame."""

from __future__ import annotations

import time
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, Field


class HarnessEventType(str, Enum):
    """The kind of an event in a turn."""

    LLM_REQUEST = "llm_request"
    LLM_RESPONSE = "llm_response"
    LLM_CHUNK = "llm_chunk"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    TEXT_OUTPUT = "text_output"
    ERROR = "error"
    TURN_COMPLETE = "turn_complete"


class HarnessEvent(BaseModel):
    """One event of a turn. The data of `TURN_COMPLETE` has `response`, and `done` once the conversation is over."""

    type: HarnessEventType
    timestamp: float = Field(default_factory=time.time)
    data: dict[str, Any] = Field(default_factory=dict)


class HarnessClientMessage(BaseModel):
    """A client's message on `WS /harness`: the text of a turn."""

    type: Literal["message"]
    content: str


class HarnessProtocolError(BaseModel):
    """The reply on `WS /harness` to an invalid frame; the connection can still be used."""

    type: Literal["protocol_error"] = "protocol_error"
    data: dict[str, Any]
