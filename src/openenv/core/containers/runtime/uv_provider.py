"""Facade: the provider that runs a project under uv. Re-exports only."""

from __future__ import annotations

from openenv.providers.provider import RuntimeProvider
from openenv.providers.uv import UVProvider

__all__ = ["RuntimeProvider", "UVProvider"]
