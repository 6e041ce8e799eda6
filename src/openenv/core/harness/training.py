"""Facade: training data of agents with their own loop. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.training_trace import TrainingTrace as TrainingTrace
from openenv.rollout.capture.training_trace import TrainingTurn as TrainingTurn
from openenv.rollout.capture.training_trace import validate_training_turn as validate_training_turn

export_imports(__name__)
