"""Environments by name, installed or of the Hub: `AutoEnv` makes clients, `AutoAction` finds the models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {"AutoEnv": "openenv.packaging.auto.auto_env", "AutoAction": "openenv.packaging.auto.auto_action"}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.packaging.auto.auto_action import AutoAction as AutoAction
    from openenv.packaging.auto.auto_env import AutoEnv as AutoEnv

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
