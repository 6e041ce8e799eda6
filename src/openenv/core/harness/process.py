"""Facade: the process of an agent. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.agent_process import HarnessProcess as HarnessProcess

export_imports(__name__)
