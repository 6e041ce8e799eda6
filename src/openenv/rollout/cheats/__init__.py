"""Cheats: agents that try to earn a reward without doing the task. Each must earn what doing nothing earns."""

from __future__ import annotations

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Cheat": "openenv.testing.cheat_catalogue",
    "CheatReport": "openenv.testing.cheats",
    "CheatResult": "openenv.testing.cheats",
    "all_cheats": "openenv.testing.cheat_catalogue",
    "run_cheats": "openenv.testing.cheats",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
