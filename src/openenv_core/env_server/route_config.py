"""Facade: the published path of `openenv.server.routes`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.server.routes import GetEndpointConfig as GetEndpointConfig
from openenv.server.routes import register_get_endpoints as register_get_endpoints

export_imports(__name__)
