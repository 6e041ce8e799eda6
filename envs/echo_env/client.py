"""The client of the Echo environment: lists and calls its tools, and sends plain messages."""

from __future__ import annotations

from typing import Any

from echo_env.models import EchoObservation
from openenv.core.client_types import StepResult
from openenv.core.mcp_client import MCPToolClient


class EchoEnv(MCPToolClient):
    """Calls `echo_message` and `echo_with_length`, or steps with an `EchoAction`."""

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        result = super()._parse_result(payload)
        fields = payload.get("observation") or {}
        if "echoed_message" not in fields:
            return result
        # `vars` keeps what the base class has read already: reward, end and metadata.
        observation = EchoObservation.model_validate({**vars(result.observation), **fields, "reward": result.reward})
        return StepResult(observation, result.reward, result.done, result.metadata)
