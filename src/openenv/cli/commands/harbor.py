"""Facade: `openenv harbor` on the module path that existing code imports."""

from __future__ import annotations

from . import published_names

_SOURCES = {name: f"openenv.cli.harbor:{name}" for name in ("harbor", "info", "rollout", "serve", "push")}

__getattr__, __dir__, __all__ = published_names(__name__, _SOURCES, app="harbor")
