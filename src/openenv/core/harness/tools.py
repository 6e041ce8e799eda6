"""Facade: names of tools that agents and environments share. The code is in `openenv.adapters.turns.turns`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.turns import resolve_tool_conflicts as resolve_tool_conflicts

export_imports(__name__)
