"""The published path of `discovery`; re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.auto.discovery import EnvironmentDiscovery as EnvironmentDiscovery
from openenv.auto.discovery import EnvironmentInfo as EnvironmentInfo
from openenv.auto.discovery import get_discovery as get_discovery
from openenv.auto.discovery import reset_discovery as reset_discovery

export_imports(__name__)
