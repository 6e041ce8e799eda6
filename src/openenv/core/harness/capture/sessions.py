"""Facade: sessions of the capture server. Re-exports only."""

from __future__ import annotations

from openenv.rollout.capture.sessions_api.capture_sessions import CaptureSession as Session
from openenv.rollout.capture.sessions_api.capture_sessions import SessionRegistry as SessionRegistry
from openenv.rollout.capture.sessions_api.capture_sessions import UpstreamAddress as Upstream
from openenv.rollout.capture.sessions_api.capture_sessions import clean_session_id as clean_session_id
from openenv.rollout.capture.sessions_api.capture_sessions import evaluation_sampling as evaluation_sampling
from openenv.rollout.capture.sessions_api.capture_sessions import extract_api_key as extract_api_key
from openenv.rollout.capture.sessions_api.capture_sessions import extract_harness_session as extract_harness_session
from openenv.rollout.capture.sessions_api.capture_sessions import rollout_type_for as rollout_type_for
from openenv.rollout.capture.sessions_api.turn_graph import RolloutGraph as RolloutGraph
from openenv.rollout.tasks.model_parameters import training_sampling as training_sampling

__all__ = [
    "RolloutGraph",
    "Session",
    "SessionRegistry",
    "Upstream",
    "clean_session_id",
    "evaluation_sampling",
    "extract_api_key",
    "extract_harness_session",
    "rollout_type_for",
    "training_sampling",
]
