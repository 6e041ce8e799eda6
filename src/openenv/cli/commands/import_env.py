"""Facade: the command `openenv import`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(__name__, {"import_env": "openenv.cli.import_env"})
