"""Facade: the command `openenv catalog`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(
    __name__,
    {
        "build": "openenv.cli.catalog",
        "catalog": "openenv.cli.catalog",
        "inspect": "openenv.cli.catalog",
        "discover": "openenv.cli.discover",
    },
    app="catalog",
)
