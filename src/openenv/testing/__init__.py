"""Tools for tests of environments, agents and sandbox backends: scripted models, contract checks, the cheat suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Cheat": "openenv.testing.cheat_catalogue",
    "CheatReport": "openenv.testing.cheats",
    "CheatResult": "openenv.testing.cheats",
    "all_cheats": "openenv.testing.cheat_catalogue",
    "run_cheats": "openenv.testing.cheats",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.testing.cheat_catalogue import Cheat as Cheat
    from openenv.testing.cheat_catalogue import all_cheats as all_cheats
    from openenv.testing.cheats import CheatReport as CheatReport
    from openenv.testing.cheats import CheatResult as CheatResult
    from openenv.testing.cheats import run_cheats as run_cheats

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
