"""Facade: the published path of `openenv.packaging.auto.installed`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.auto.installed import EnvironmentDiscovery as EnvironmentDiscovery
from openenv.packaging.auto.installed import EnvironmentInfo as EnvironmentInfo
from openenv.packaging.auto.installed import get_discovery as get_discovery
from openenv.packaging.auto.installed import reset_discovery as reset_discovery

export_imports(__name__)
