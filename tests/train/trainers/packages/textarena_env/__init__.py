"""A package as the hub has them: text games behind one action, for TRL's examples. Its server is in `games`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import Action, Observation, State

__all__ = ["TextArenaAction", "TextArenaEnv", "TextArenaMessage", "TextArenaObservation"]


class TextArenaAction(Action):
    """What the player says."""

    message: str


class TextArenaMessage(BaseModel):
    """One message of the game."""

    sender_id: int = -1
    content: str = ""
    category: str = "MESSAGE"


class TextArenaObservation(Observation):
    """All that was said until now, as one message."""

    prompt: str = ""
    messages: list[TextArenaMessage] = Field(default_factory=list)


class TextArenaEnv(EnvClient[TextArenaAction, TextArenaObservation, State]):
    """The client."""

    def _step_payload(self, action: TextArenaAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[TextArenaObservation]:
        fields = payload["observation"]
        observation = TextArenaObservation(
            prompt=fields.get("prompt", ""),
            messages=fields.get("messages", []),
            done=payload.get("done", False),
            reward=payload.get("reward"),
        )
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
