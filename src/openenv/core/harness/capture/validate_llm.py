"""Facade: the probe of a model endpoint. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.parameter_fixes import behaviour_warnings as behaviour_warnings
from openenv.rollout.capture.parameter_fixes import diagnose as diagnose
from openenv.rollout.capture.sessions_api.capture_checks import check_upstream_response as check_upstream_response
from openenv.rollout.capture.sessions_api.engine_client import auth_headers as auth_headers
from openenv.rollout.capture.sessions_api.engine_client import normalise_engine_base as normalise_engine_base
from openenv.rollout.capture.sessions_api.engine_client import normalize_response as normalize_response
from openenv.rollout.capture.sessions_api.engine_client import openai_api_base as openai_api_base
from openenv.rollout.capture.sessions_api.engine_probe import LLMReport as LLMReport
from openenv.rollout.capture.sessions_api.engine_probe import list_models as list_models
from openenv.rollout.capture.sessions_api.engine_probe import probe_logprobs_mode as probe_logprobs_mode
from openenv.rollout.capture.sessions_api.engine_probe import probe_tool_support as probe_tool_support
from openenv.rollout.capture.sessions_api.engine_probe import require_llm as require_llm
from openenv.rollout.capture.sessions_api.engine_probe import validate_llm as validate_llm

export_imports(__name__)
