"""Facade: clients without models. Re-exports only; the code lives in `openenv.client.generic`."""

from __future__ import annotations

from openenv.client.env_client import (
    EnvClient,
)
from openenv.client.generic import (
    GenericAction,
    GenericEnvClient,
)
from openenv.types import (
    StepResult,
)

__all__ = [
    "EnvClient",
    "GenericAction",
    "GenericEnvClient",
    "StepResult",
]
