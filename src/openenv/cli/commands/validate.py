"""Facade: `openenv validate` on the module path that existing code imports."""

from __future__ import annotations

from . import published_names

__getattr__, __dir__, __all__ = published_names(__name__, {"validate": "openenv.cli.validate:validate"})
