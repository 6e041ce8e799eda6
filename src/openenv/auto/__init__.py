"""Facade: the published path of `openenv.packaging.auto.auto_action`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.packaging.auto.auto_action import AutoAction as AutoAction
    from openenv.packaging.auto.auto_env import AutoEnv as AutoEnv

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module({"openenv.packaging.auto.auto_action": "AutoAction", "openenv.packaging.auto.auto_env": "AutoEnv"}),
    )
