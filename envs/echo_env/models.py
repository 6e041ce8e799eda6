"""What the Echo environment is sent and what it answers."""

from __future__ import annotations

from pydantic import Field

from openenv.core.env_server.types import Action, Observation


class EchoAction(Action):
    """A message to repeat."""

    message: str = Field(description="What to repeat")


class EchoObservation(Observation):
    """The message, repeated."""

    echoed_message: str = Field(default="", description="The message as it was sent")
    message_length: int = Field(default=0, ge=0, description="Its length in characters")
