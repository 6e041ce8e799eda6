"""Facade: `openenv import` on the module path that existing code imports."""

from __future__ import annotations

from . import published_names

__getattr__, __dir__, __all__ = published_names(__name__, {"import_env": "openenv.cli.import_env:import_env"})
