"""Facade: the command `openenv harbor`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(
    __name__,
    {
        "harbor": "openenv.cli.harbor",
        "info": "openenv.cli.harbor",
        "push": "openenv.cli.harbor",
        "rollout": "openenv.cli.harbor",
        "serve": "openenv.cli.harbor",
    },
    app="harbor",
)
