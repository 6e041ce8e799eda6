"""What an OpenCode agent is to do in one session of the harness.

Knows values only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field


class OpenCodeTask(BaseModel):
    """An instruction and what has to be there before it is given."""

    instruction: str = Field(description="The agent's instruction")
    setup_shell: str | None = Field(default=None, description="Runs before the agent starts")
    upload_files: dict[str, str] = Field(default_factory=dict, description="Text files by their absolute path")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Whatever belongs to the task")

    @classmethod
    def coerce(cls, value: Any) -> OpenCodeTask:
        """Return a task: the value itself, an instruction, a mapping of the fields, or the messages of a prompt.

        Of messages, as trainers have them in their datasets, the last one of the user is the instruction.

        Raises:
            TypeError: It is none of these.
        """
        if isinstance(value, OpenCodeTask):
            return value
        if isinstance(value, str):
            return cls(instruction=value)
        if isinstance(value, Mapping):
            return cls.model_validate(dict(value))
        if isinstance(value, list | tuple) and (instruction := _asked_in(value)) is not None:
            return cls(instruction=instruction)
        raise TypeError(f"Cannot coerce {type(value).__name__} to an OpenCodeTask: give an instruction or its fields")


def _asked_in(messages: Sequence[Any]) -> str | None:
    """Return the text of the last message of a user; None where there is none."""
    for message in reversed(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list):
                parts = [part.get("text") for part in content if isinstance(part, Mapping)]
                content = "".join(part for part in parts if isinstance(part, str))
            return content if isinstance(content, str) and content else None
    return None
