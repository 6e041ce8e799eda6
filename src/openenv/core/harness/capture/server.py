"""Facade: the capture server, also as a command. Re-exports only."""

from __future__ import annotations

import sys as _sys

from openenv.rollout.capture.sessions_api.capture_checks import check_turn_eval as check_turn_eval
from openenv.rollout.capture.sessions_api.capture_sessions import SessionRegistry as SessionRegistry
from openenv.rollout.capture.sessions_api.capture_sessions import UpstreamAddress as Upstream
from openenv.rollout.capture.sessions_api.capture_sessions import evaluation_sampling as evaluation_sampling
from openenv.rollout.capture.sessions_api.capture_sessions import extract_api_key as extract_api_key
from openenv.rollout.capture.sessions_api.capture_sessions import extract_harness_session as extract_harness_session
from openenv.rollout.capture.sessions_api.capture_sessions import rollout_type_for as rollout_type_for
from openenv.rollout.capture.sessions_api.chat_requests import approximate_token_count as approximate_token_count
from openenv.rollout.capture.sessions_api.chat_requests import aux_dialect as aux_dialect
from openenv.rollout.capture.sessions_api.chat_requests import aux_token_count_response as aux_token_count_response
from openenv.rollout.capture.sessions_api.chat_requests import clamp_output_tokens as clamp_output_tokens
from openenv.rollout.capture.sessions_api.chat_requests import is_aux_route as is_aux_route
from openenv.rollout.capture.sessions_api.chat_requests import normalise_client_payload as normalise_client_payload
from openenv.rollout.capture.sessions_api.chat_requests import normalise_for_capture as normalise_for_capture
from openenv.rollout.capture.sessions_api.chat_requests import normalise_response as normalise_response
from openenv.rollout.capture.sessions_api.chat_requests import wants_stream as wants_stream
from openenv.rollout.capture.sessions_api.detection import APIType as APIType
from openenv.rollout.capture.sessions_api.detection import detect as detect
from openenv.rollout.capture.sessions_api.documents import export_session as export_session
from openenv.rollout.capture.sessions_api.documents import to_trace_entries as to_trace_entries
from openenv.rollout.capture.sessions_api.engine_client import InferenceClient as InferenceClient
from openenv.rollout.capture.sessions_api.engine_client import truncating_params as truncating_params
from openenv.rollout.capture.sessions_api.session_app import create_app as create_app
from openenv.rollout.capture.sessions_api.session_app import main as main
from openenv.rollout.capture.sessions_api.transformers import TransformManager as TransformManager
from openenv.rollout.capture.sessions_api.turn_graph import TurnNode as TurnNode
from openenv.rollout.capture.sessions_api.upstream_pool import UpstreamPool as UpstreamPool
from openenv.rollout.capture.training_trace import check_turn as check_turn
from openenv.rollout.capture.upstream_errors import UpstreamError as UpstreamError
from openenv.rollout.capture.upstream_errors import UpstreamHTTPError as UpstreamHTTPError
from openenv.rollout.capture.upstream_errors import UpstreamRequestError as UpstreamRequestError
from openenv.rollout.tasks.model_parameters import training_sampling as training_sampling

__all__ = [
    "APIType",
    "InferenceClient",
    "SessionRegistry",
    "TransformManager",
    "TurnNode",
    "Upstream",
    "UpstreamError",
    "UpstreamHTTPError",
    "UpstreamPool",
    "UpstreamRequestError",
    "approximate_token_count",
    "aux_dialect",
    "aux_token_count_response",
    "check_turn",
    "check_turn_eval",
    "clamp_output_tokens",
    "create_app",
    "detect",
    "evaluation_sampling",
    "export_session",
    "extract_api_key",
    "extract_harness_session",
    "is_aux_route",
    "main",
    "normalise_client_payload",
    "normalise_for_capture",
    "normalise_response",
    "rollout_type_for",
    "to_trace_entries",
    "training_sampling",
    "truncating_params",
    "wants_stream",
]

if __name__ == "__main__":
    _sys.exit(main())
