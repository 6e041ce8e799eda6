"""Facade: the published path of `openenv.packaging.validate.report`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.report import write_runtime_bundle as write_runtime_bundle

export_imports(__name__)
