"""Facade: the provider of Daytona sandboxes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.providers.daytona import DaytonaProvider as DaytonaProvider

export_imports(__name__)
