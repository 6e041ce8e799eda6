"""Facade: the published path of `openenv.adapters.harbor.install_fixes`. Re-exports only."""

from __future__ import annotations

from openenv.adapters.harbor.install_fixes import *  # noqa: F403
from openenv.adapters.harbor.install_fixes import __dir__ as __dir__
from openenv.adapters.harbor.install_fixes import __getattr__ as __getattr__
