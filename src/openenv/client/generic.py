"""Clients without models: dicts in, dicts out.

Knows the payload's three keys and nothing of any environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..types import StepResult
from .env_client import EnvClient


class GenericAction(dict[str, Any]):
    """An action as a dict: `GenericAction(message="hi")`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}={value!r}" for key, value in self.items())
        return f"GenericAction({fields})"


class GenericEnvClient(EnvClient[Any, dict[str, Any], dict[str, Any]]):
    """A client for any environment, with dicts instead of models."""

    def _step_payload(self, action: Any) -> dict[str, Any]:
        if isinstance(action, (dict, Mapping)):  # dict is one, but asking for it first is quicker
            return dict(action)
        if isinstance(action, BaseModel):
            return action.model_dump()
        if hasattr(action, "__dict__"):
            return dict(vars(action))
        raise TypeError(f"an action must be a dict, a pydantic model or an object with fields, not {action!r}")

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[dict[str, Any]]:
        get = payload.get
        return StepResult(get("observation", {}), get("reward"), bool(get("done")), get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload
