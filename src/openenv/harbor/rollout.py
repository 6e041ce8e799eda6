"""Facade: the published path of `openenv.adapters.harbor.harbor_package`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.harbor_package import build_trial_config as build_trial_config
from openenv.adapters.harbor.models import HarborRolloutResult as HarborRolloutResult
from openenv.adapters.harbor.models import HarborTurn as HarborTurn
from openenv.adapters.harbor.rollout import run_rollout as run_rollout

export_imports(__name__)
