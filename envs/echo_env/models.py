"""What the Echo environment is sent and what it answers, beside the calls of its tools."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.env_server.types import Action, Observation


class EchoAction(Action):
    """A message to repeat."""

    message: str = Field(description="What to repeat")


class EchoObservation(Observation):
    """A message that was repeated."""

    echoed_message: str = Field(default="", description="The message")
    message_length: int = Field(default=0, ge=0, description="Its number of characters")


class EchoStepAction(CallToolAction):
    """Any action of this environment: the call of a tool, a list of the tools, or a plain message."""

    @model_validator(mode="wrap")
    @classmethod
    def _by_its_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if isinstance(data, dict):
            if "message" in data:
                return EchoAction.model_validate(data)
            if data.get("type") == "list_tools":
                return ListToolsAction.model_validate(data)
        return handler(data)
