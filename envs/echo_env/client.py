"""The typed client of the Echo environment."""

from __future__ import annotations

from typing import Any

from echo_env.models import EchoAction, EchoObservation
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import State


class EchoEnv(EnvClient[EchoAction, EchoObservation, State]):
    """Sends messages and gets them back."""

    def _step_payload(self, action: EchoAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[EchoObservation]:
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        observation = EchoObservation.model_validate({**payload["observation"], "reward": reward, "done": done})
        return StepResult(observation=observation, reward=reward, done=done, metadata=payload.get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State.model_validate(payload)
