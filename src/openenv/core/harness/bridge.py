"""Facade: the bridge from agents to tools. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.tool_bridge import HarnessMCPBridge as HarnessMCPBridge
from openenv.adapters.turns.tool_bridge import build_bridge_server as build_bridge_server

export_imports(__name__)
