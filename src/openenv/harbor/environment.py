"""Facade: the published path of `openenv.adapters.harbor.environment`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.environment import HarborEnvironment as HarborEnvironment

export_imports(__name__)
