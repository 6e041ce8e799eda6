"""Facade: the command `openenv init`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(__name__, {"init": "openenv.cli.init"}, app="init")
