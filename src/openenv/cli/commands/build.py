"""Facade: the command `openenv build`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(__name__, {"build": "openenv.cli.build"}, app="build")
