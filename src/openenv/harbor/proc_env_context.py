"""Facade: the published path of `openenv.adapters.harbor.harbor_package`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.harbor_package import enabled as enabled
from openenv.adapters.harbor.harbor_package import install as install
from openenv.adapters.harbor.harbor_package import overlay as overlay

export_imports(__name__)
