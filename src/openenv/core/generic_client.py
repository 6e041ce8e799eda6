"""Facade: clients without models. Re-exports only; the code lives in `openenv.client.generic`."""

from __future__ import annotations

from openenv.client.generic import (
    GenericAction,
    GenericEnvClient,
)

__all__ = [
    "GenericAction",
    "GenericEnvClient",
]
