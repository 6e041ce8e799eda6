"""Facade: the published path of `openenv.adapters.harbor.capabilities`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.capabilities import HOST_SIDE_AGENTS as HOST_SIDE_AGENTS
from openenv.adapters.harbor.capabilities import KNOWN_SANDBOXES as KNOWN_SANDBOXES
from openenv.adapters.harbor.capabilities import Capabilities as Capabilities
from openenv.adapters.harbor.capabilities import HarnessStatus as HarnessStatus
from openenv.adapters.harbor.capabilities import SandboxStatus as SandboxStatus
from openenv.adapters.harbor.capabilities import capabilities as capabilities
from openenv.adapters.harbor.capabilities import check_sandbox as check_sandbox
from openenv.adapters.harbor.capabilities import list_harnesses as list_harnesses

export_imports(__name__)
