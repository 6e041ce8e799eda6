"""Facade: `openenv skills` on the module path that existing code imports."""

from __future__ import annotations

from . import published_names

_SOURCES = {name: f"openenv.cli.skills:{name}" for name in ("skills", "skills_preview", "skills_add")}

__getattr__, __dir__, __all__ = published_names(__name__, _SOURCES, app="skills")
