"""The counter's client, with a helper method of its own."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from .models import CounterAction, CounterObservation, CounterState


class CounterEnv(EnvClient[CounterAction, CounterObservation, CounterState]):
    """Counts."""

    def _step_payload(self, action: CounterAction) -> dict[str, Any]:
        return action.model_dump(exclude_none=True)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[CounterObservation]:
        observation = CounterObservation(
            **payload["observation"], reward=payload.get("reward"), done=payload.get("done", False)
        )
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> CounterState:
        return CounterState(**payload)

    async def add_all(self, amounts: list[int]) -> int:
        """Take several steps and return the last total."""
        total = 0
        for amount in amounts:
            total = (await self.step(CounterAction(amount=amount))).observation.total
        return total
