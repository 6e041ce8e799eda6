"""Facade: the published path of `openenv.adapters.harbor.atif`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.atif import agent_steps as agent_steps
from openenv.adapters.harbor.atif import atif_turn_lengths as atif_turn_lengths
from openenv.adapters.harbor.atif import load_atif as load_atif
from openenv.adapters.harbor.atif import load_trace as load_trace
from openenv.adapters.harbor.atif import merge_into_atif as merge_into_atif
from openenv.adapters.harbor.atif import reconcile as reconcile

export_imports(__name__)
