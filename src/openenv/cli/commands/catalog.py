"""Facade: `openenv catalog` and `openenv discover` on the module path that existing code imports."""

from __future__ import annotations

from . import published_names

_SOURCES = {name: f"openenv.cli.catalog:{name}" for name in ("catalog", "build", "inspect")}
_SOURCES["discover"] = "openenv.cli.discover:discover"

__getattr__, __dir__, __all__ = published_names(__name__, _SOURCES, app="catalog")
