"""Facade: the blocking client. Re-exports only; the code lives in `openenv.client.sync_client`."""

from __future__ import annotations

from openenv.client.sync_client import (
    SyncEnvClient,
)

__all__ = [
    "SyncEnvClient",
]
