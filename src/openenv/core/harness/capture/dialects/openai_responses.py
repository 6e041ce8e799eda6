"""Facade: the transformer of OpenAI responses. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.dialects.content import encrypt_reasoning as encrypt_reasoning
from openenv.rollout.capture.dialects.content import (
    extract_reasoning_from_responses_item as extract_reasoning_from_responses_item,
)
from openenv.rollout.capture.dialects.content import (
    openai_responses_input_content_to_chat as openai_responses_input_content_to_chat,
)
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer
from openenv.rollout.capture.sessions_api.transformers import OpenAIResponsesTransformer as OpenAIResponsesTransformer
from openenv.rollout.capture.sessions_api.transformers import ResponsesStreamState as ResponsesStreamState
from openenv.rollout.capture.upstream_errors import UpstreamRequestError as UpstreamRequestError

export_imports(__name__)
