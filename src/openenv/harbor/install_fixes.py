"""Facade: the published path of `openenv.adapters.harbor.harbor_package`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import lazy_exports
from openenv.adapters.harbor.harbor_package import INSTALL_FIXES

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, dict.fromkeys(INSTALL_FIXES, "openenv.adapters.harbor.harbor_package")
)
