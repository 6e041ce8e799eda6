"""Facade: the published path of `openenv.packaging.auto`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.packaging.auto.auto_action": "AutoAction",
        "openenv.packaging.auto.auto_env": "AutoEnv",
    }
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.packaging.auto.auto_action import AutoAction as AutoAction
    from openenv.packaging.auto.auto_env import AutoEnv as AutoEnv

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
