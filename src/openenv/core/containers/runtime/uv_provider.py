"""Facade: the provider that runs a project under uv. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.providers.provider import RuntimeProvider as RuntimeProvider
from openenv.providers.uv import UVProvider as UVProvider

export_imports(__name__)
