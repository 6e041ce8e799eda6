"""What an OpenCode agent is to do in one session of the harness.

Knows values only.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Return a task: the value itself, an instruction, or a mapping of the fields.

        Raises:
            TypeError: It is none of these.
        """
        if isinstance(value, OpenCodeTask):
            return value
        if isinstance(value, str):
            return cls(instruction=value)
        if isinstance(value, Mapping):
            return cls.model_validate(dict(value))
        raise TypeError(f"Cannot coerce {type(value).__name__} to an OpenCodeTask: give an instruction or its fields")
