"""Facade: the published path of `openenv.adapters.harbor.client`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.client import HarborEnv as HarborEnv

export_imports(__name__)
