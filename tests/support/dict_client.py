"""The client of plain HTTP with dicts in place of models; `GenericEnvClient` is that of WebSockets."""

from __future__ import annotations

from typing import Any

from openenv import HTTPEnvClient
from openenv.types import StepResult


class DictHTTPClient(HTTPEnvClient[Any, Any, Any]):
    """Send and return dicts."""

    def _step_payload(self, action: Any) -> dict[str, Any]:
        return dict(action)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        return StepResult(payload["observation"], payload["reward"], payload["done"], payload.get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        return payload
