"""Facade: the blocking client. Re-exports only; the code lives in `openenv.client.env_client`."""

from __future__ import annotations

from openenv.client.env_client import ActT, EnvClient, ObsT, StateT, SyncEnvClient
from openenv.types import (
    StepResult,
)

__all__ = [
    "ActT",
    "EnvClient",
    "ObsT",
    "StateT",
    "StepResult",
    "SyncEnvClient",
]
