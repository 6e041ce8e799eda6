"""Facade: the provider of Azure Container Apps sandboxes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.providers.aca import ACASandboxProvider as ACASandboxProvider

export_imports(__name__)
