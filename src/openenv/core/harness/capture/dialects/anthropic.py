"""Facade: the transformer of Anthropic messages. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.dialects.content import (
    anthropic_content_to_openai_chat as anthropic_content_to_openai_chat,
)
from openenv.rollout.capture.dialects.content import (
    extract_reasoning_from_anthropic_content as extract_reasoning_from_anthropic_content,
)
from openenv.rollout.capture.dialects.content import make_signature as make_signature
from openenv.rollout.capture.dialects.content import (
    openai_chat_content_to_anthropic_blocks as openai_chat_content_to_anthropic_blocks,
)
from openenv.rollout.capture.sessions_api.transformers import AnthropicStreamState as AnthropicStreamState
from openenv.rollout.capture.sessions_api.transformers import AnthropicTransformer as AnthropicTransformer
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer
from openenv.rollout.capture.upstream_errors import UpstreamRequestError as UpstreamRequestError

export_imports(__name__)
