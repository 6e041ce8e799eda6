"""Facade: the published path of `openenv.adapters.harbor.capabilities`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.capabilities import load_env_file as load_env_file
from openenv.adapters.harbor.capabilities import prepare as prepare

export_imports(__name__)
