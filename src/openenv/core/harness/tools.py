"""Facade: names of tools that agents and environments share. The code is in `openenv.harness.turns`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.harness.turns import resolve_tool_conflicts as resolve_tool_conflicts

export_imports(__name__)
