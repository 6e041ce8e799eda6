"""The typed client of the Gridworld."""

from __future__ import annotations

from typing import Any

from gridworld_env.models import GridworldAction, GridworldObservation, GridworldState
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient


class GridworldEnv(EnvClient[GridworldAction, GridworldObservation, GridworldState]):
    """Moves about on a served board."""

    def _step_payload(self, action: GridworldAction) -> dict[str, Any]:
        return {"move": action.move}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[GridworldObservation]:
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        observation = GridworldObservation.model_validate({**payload["observation"], "reward": reward, "done": done})
        return StepResult(observation=observation, reward=reward, done=done, metadata=payload.get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> GridworldState:
        return GridworldState.model_validate(payload)
