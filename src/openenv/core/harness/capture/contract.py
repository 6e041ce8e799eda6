"""Facade: training data of a captured rollout. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.documents import measure_retokenization_skew as measure_retokenization_skew
from openenv.rollout.capture.sessions_api.documents import to_trace_entries as to_trace_entries
from openenv.rollout.capture.sessions_api.documents import to_training_trace as to_training_trace
from openenv.rollout.capture.sessions_api.documents import to_turn_records as to_turn_records
from openenv.rollout.capture.sessions_api.turn_graph import RolloutGraph as RolloutGraph
from openenv.rollout.capture.sessions_api.turn_graph import TurnNode as TurnNode
from openenv.rollout.capture.training_trace import TrainingTrace as TrainingTrace
from openenv.rollout.capture.training_trace import check_turn as check_turn
from openenv.rollout.capture.training_trace import validate_training_turn as validate_training_turn

export_imports(__name__)
