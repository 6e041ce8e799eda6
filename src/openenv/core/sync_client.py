"""Facade: the blocking client. Re-exports only; the code lives in `openenv.client.sync_client`."""

from __future__ import annotations

from openenv.client.env_client import (
    ActT,
    EnvClient,
    ObsT,
    StateT,
)
from openenv.client.sync_client import (
    SyncEnvClient,
)
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
