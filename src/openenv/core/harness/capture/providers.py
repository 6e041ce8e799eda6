"""Facade: endpoints that speak Anthropic messages. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.dialects.chat_over_anthropic import anthropic_request as anthropic_request
from openenv.rollout.capture.dialects.chat_over_anthropic import anthropic_response as anthropic_response
from openenv.rollout.capture.dialects.chat_over_anthropic import replay_anthropic as replay_anthropic
from openenv.rollout.capture.dialects.content import (
    openai_chat_content_to_anthropic_blocks as openai_chat_content_to_anthropic_blocks,
)
from openenv.rollout.capture.upstream_errors import ProviderConversionError as ProviderConversionError
from openenv.rollout.capture.upstream_errors import UpstreamRequestError as UpstreamRequestError

export_imports(__name__)
