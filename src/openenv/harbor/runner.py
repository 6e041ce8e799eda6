"""Facade: the published path of `openenv.adapters.harbor.runner`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.runner import CaptureServer as CaptureServer
from openenv.adapters.harbor.runner import run_batch as run_batch

export_imports(__name__)
