"""Facade: conflicts between tool names. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.turns import resolve_tool_conflicts as resolve_tool_conflicts

export_imports(__name__)
