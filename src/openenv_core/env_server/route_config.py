"""Legacy path of GET routes from data. Re-exports only; the code lives in `openenv.server.routes`."""

from __future__ import annotations

from openenv.server.routes import GetEndpointConfig, register_get_endpoints

__all__ = ["GetEndpointConfig", "register_get_endpoints"]
