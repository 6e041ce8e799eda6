"""Tools for your tests: serve an environment, script a model, check a sandbox backend or provider, run the cheat suite.

Each part loads at its first use. Only the command line imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Cheat": "openenv.testing.cheats",
    "CheatReport": "openenv.testing.cheats",
    "CheatResult": "openenv.testing.cheats",
    "CheckResult": "openenv.sandboxes.checks",
    "CutFailure": "openenv.testing.scripted.script",
    "Failure": "openenv.testing.scripted.script",
    "HangFailure": "openenv.testing.scripted.script",
    "ModelAddress": "openenv.testing.scripted.server",
    "Played": "openenv.testing.scripted.server",
    "Script": "openenv.testing.scripted.script",
    "ScriptedCall": "openenv.testing.scripted.script",
    "ScriptedModel": "openenv.testing.scripted.server",
    "Served": "openenv.testing.serving",
    "StatusFailure": "openenv.testing.scripted.script",
    "Turn": "openenv.testing.scripted.script",
    "all_cheats": "openenv.testing.cheats",
    "check_provider": "openenv.testing.provider_contract",
    "load_scripts": "openenv.testing.scripted.script",
    "run_cheats": "openenv.testing.cheats",
    "self_check": "openenv.sandboxes.checks",
    "serve": "openenv.testing.serving",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.sandboxes.checks import CheckResult as CheckResult
    from openenv.sandboxes.checks import self_check as self_check
    from openenv.testing.cheats import Cheat as Cheat
    from openenv.testing.cheats import CheatReport as CheatReport
    from openenv.testing.cheats import CheatResult as CheatResult
    from openenv.testing.cheats import all_cheats as all_cheats
    from openenv.testing.cheats import run_cheats as run_cheats
    from openenv.testing.provider_contract import check_provider as check_provider
    from openenv.testing.scripted.script import CutFailure as CutFailure
    from openenv.testing.scripted.script import Failure as Failure
    from openenv.testing.scripted.script import HangFailure as HangFailure
    from openenv.testing.scripted.script import Script as Script
    from openenv.testing.scripted.script import ScriptedCall as ScriptedCall
    from openenv.testing.scripted.script import StatusFailure as StatusFailure
    from openenv.testing.scripted.script import Turn as Turn
    from openenv.testing.scripted.script import load_scripts as load_scripts
    from openenv.testing.scripted.server import ModelAddress as ModelAddress
    from openenv.testing.scripted.server import Played as Played
    from openenv.testing.scripted.server import ScriptedModel as ScriptedModel
    from openenv.testing.serving import Served as Served
    from openenv.testing.serving import serve as serve

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
