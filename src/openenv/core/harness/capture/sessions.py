"""Facade: sessions of the capture server, on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.capture_sessions import CaptureSession as _CaptureSession
from openenv.rollout.capture.sessions_api.capture_sessions import SessionRegistry as SessionRegistry
from openenv.rollout.capture.sessions_api.capture_sessions import UpstreamAddress as _UpstreamAddress
from openenv.rollout.capture.sessions_api.capture_sessions import clean_session_id as clean_session_id
from openenv.rollout.capture.sessions_api.capture_sessions import evaluation_sampling as evaluation_sampling
from openenv.rollout.capture.sessions_api.capture_sessions import extract_api_key as extract_api_key
from openenv.rollout.capture.sessions_api.capture_sessions import extract_harness_session as extract_harness_session
from openenv.rollout.capture.sessions_api.capture_sessions import rollout_type_for as rollout_type_for
from openenv.rollout.capture.sessions_api.turn_graph import RolloutGraph as RolloutGraph
from openenv.rollout.tasks.model_parameters import training_sampling as training_sampling

Session = _CaptureSession
Upstream = _UpstreamAddress

export_imports(__name__)
