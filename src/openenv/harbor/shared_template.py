"""Facade: the published path of `openenv.adapters.harbor.harbor_package`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.harbor_package import enable_shared_templates as enable_shared_templates

export_imports(__name__)
