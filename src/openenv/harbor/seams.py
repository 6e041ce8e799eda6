"""Facade: the published path of `openenv.adapters.harbor.seams`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.seams import OPENCODE_PROVIDER as OPENCODE_PROVIDER
from openenv.adapters.harbor.seams import SEAMS as SEAMS
from openenv.adapters.harbor.seams import Seam as Seam
from openenv.adapters.harbor.seams import acp_opencode_config as acp_opencode_config
from openenv.adapters.harbor.seams import agent_facing_model as agent_facing_model
from openenv.adapters.harbor.seams import get as get

export_imports(__name__)
