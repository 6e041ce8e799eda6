"""Facade: the published path of `openenv.adapters.harbor.contract`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.contract import export_training_contract as export_training_contract
from openenv.adapters.harbor.contract import to_trace_entries as to_trace_entries
from openenv.adapters.harbor.contract import to_training_trace as to_training_trace

export_imports(__name__)
