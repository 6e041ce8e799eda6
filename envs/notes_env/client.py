"""The client of the Notes environment."""

from __future__ import annotations

from typing import Any

from notes_env.models import NotesState
from openenv.core.mcp_client import MCPToolClient


class NotesEnv(MCPToolClient):
    """Calls the tools: by `step` with the reward of the episode, by `call_tool` without."""

    def _parse_state(self, payload: dict[str, Any]) -> NotesState:
        return NotesState.model_validate(payload)
