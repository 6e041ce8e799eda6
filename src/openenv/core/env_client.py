"""Facade: the client's base class. Re-exports only; the code lives in `openenv.client.env_client`."""

from __future__ import annotations

from openenv.client.env_client import ActT, EnvClient, ObsT, StateT
from openenv.client.url import (
    convert_to_ws_url,
    hf_space_subdomain,
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
    "convert_to_ws_url",
    "hf_space_subdomain",
]
