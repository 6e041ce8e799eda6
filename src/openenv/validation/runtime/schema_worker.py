"""Facade: the published path of `openenv.packaging.validate.json_schema`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.json_schema import MAX_INPUT_BYTES as MAX_INPUT_BYTES
from openenv.packaging.validate.json_schema import main as main

export_imports(__name__)
