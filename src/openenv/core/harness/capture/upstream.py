"""Facade: requests to model endpoints, on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.parameters import training_sampling as training_sampling

export_imports(__name__)
