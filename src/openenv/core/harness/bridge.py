"""Facade: an environment's tools as an MCP server for its agent. The code is in `openenv.harness.tool_bridge`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.harness.tool_bridge import HarnessMCPBridge as HarnessMCPBridge
from openenv.harness.tool_bridge import build_bridge_server as build_bridge_server

export_imports(__name__)
