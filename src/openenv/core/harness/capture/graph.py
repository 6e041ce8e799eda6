"""Facade: the calls of a rollout, linked. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.turn_graph import RolloutGraph as RolloutGraph
from openenv.rollout.capture.sessions_api.turn_graph import TrainingSequence as TrainingSequence
from openenv.rollout.capture.sessions_api.turn_graph import TurnNode as TurnNode
from openenv.rollout.capture.sessions_api.turn_graph import common_prefix_len as common_prefix_len

export_imports(__name__)
