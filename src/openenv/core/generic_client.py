"""Facade: clients without models. Re-exports only; the code lives in `openenv.client.env_client`."""

from __future__ import annotations

from openenv.client.env_client import EnvClient, GenericAction, GenericEnvClient
from openenv.types import (
    StepResult,
)

__all__ = [
    "EnvClient",
    "GenericAction",
    "GenericEnvClient",
    "StepResult",
]
