"""A package as the hub has them: board games behind one action, for TRL's examples. Its server is in `games`."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import State

from .models import OpenSpielAction, OpenSpielObservation

__all__ = ["OpenSpielEnv"]


class OpenSpielEnv(EnvClient[OpenSpielAction, OpenSpielObservation, State]):
    """The client."""

    def _step_payload(self, action: OpenSpielAction) -> dict[str, Any]:
        return {"action_id": action.action_id, "game_name": action.game_name}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[OpenSpielObservation]:
        fields = payload["observation"]
        observation = OpenSpielObservation(
            info_state=fields.get("info_state", []),
            legal_actions=fields.get("legal_actions", []),
            done=payload.get("done", False),
            reward=payload.get("reward"),
        )
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
