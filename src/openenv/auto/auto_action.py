"""Facade: the published path of `openenv.packaging.auto.auto_action`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.auto.auto_action import AutoAction as AutoAction
from openenv.packaging.auto.auto_env import AutoEnv as AutoEnv
from openenv.packaging.auto.installed import get_discovery as get_discovery

export_imports(__name__)
