"""Facade: the command `openenv skills`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(
    __name__,
    {"skills": "openenv.cli.skills", "skills_add": "openenv.cli.skills", "skills_preview": "openenv.cli.skills"},
    app="skills",
)
