"""The same over stateful HTTP: a blocking client that repeats requests under their `Idempotency-Key`."""

from __future__ import annotations

from typing import Any

from openenv import HTTPEnvClient
from openenv.core.client_types import StepResult

from .environment import Move

REPLY_S = 3.0


class WebPlayer(HTTPEnvClient[Move, dict[str, Any], dict[str, Any]]):
    """A client of the counting environment."""

    UNSENT_IS_HARMLESS = True  # the episode goes on after a request that could not be sent

    def _step_payload(self, action: Move) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[dict[str, Any]]:
        seen = {**payload["observation"], "reward": payload.get("reward")}
        return StepResult(observation=seen, reward=payload.get("reward"), done=bool(payload.get("done")))

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload


def web_client(url: str, reconnect_timeout_s: float = 10.0) -> WebPlayer:
    """Return a client that does not wait long for an answer that will not come."""
    return WebPlayer(url, request_timeout_s=REPLY_S, reconnect_timeout_s=reconnect_timeout_s)
