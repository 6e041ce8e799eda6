"""Facade: the published path of `openenv.adapters.harbor.qualification`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.qualification import PROVIDERS as PROVIDERS
from openenv.adapters.harbor.qualification import STATUSES as STATUSES
from openenv.adapters.harbor.qualification import evaluate_eval_capture as evaluate_eval_capture
from openenv.adapters.harbor.qualification import harness_maturity_rows as harness_maturity_rows
from openenv.adapters.harbor.qualification import qualification_details as qualification_details
from openenv.adapters.harbor.qualification import qualification_rows as qualification_rows

export_imports(__name__)
