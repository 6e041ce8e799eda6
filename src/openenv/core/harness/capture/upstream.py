"""Facade: requests to model endpoints. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.parameter_fixes import ParamFix as ParamFix
from openenv.rollout.capture.parameter_fixes import diagnose as diagnose
from openenv.rollout.capture.sessions_api.engine_client import InferenceClient as InferenceClient
from openenv.rollout.capture.sessions_api.engine_client import auth_headers as auth_headers
from openenv.rollout.capture.sessions_api.engine_client import normalise_engine_base as normalise_engine_base
from openenv.rollout.capture.sessions_api.engine_client import normalize_response as normalize_response
from openenv.rollout.capture.sessions_api.engine_client import openai_api_base as openai_api_base
from openenv.rollout.capture.sessions_api.engine_client import prepare_request as prepare_request
from openenv.rollout.capture.sessions_api.engine_client import truncating_params as truncating_params
from openenv.rollout.capture.upstream_errors import UpstreamError as UpstreamError
from openenv.rollout.capture.upstream_errors import UpstreamHTTPError as UpstreamHTTPError
from openenv.rollout.capture.upstream_errors import UpstreamRequestError as UpstreamRequestError
from openenv.rollout.capture.upstream_errors import UpstreamTimeoutError as UpstreamTimeoutError
from openenv.rollout.capture.upstream_errors import UpstreamTransportError as UpstreamTransportError
from openenv.rollout.tasks.model_parameters import training_sampling as training_sampling

export_imports(__name__)
