"""Facade: the published path of `openenv.adapters.harbor.proc_env_context`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.proc_env_context import enabled as enabled
from openenv.adapters.harbor.proc_env_context import install as install
from openenv.adapters.harbor.proc_env_context import overlay as overlay

export_imports(__name__)
