"""Facade: the published path of `openenv.packaging.validate.runtime.artifacts`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.runtime.artifacts import write_runtime_bundle as write_runtime_bundle

export_imports(__name__)
