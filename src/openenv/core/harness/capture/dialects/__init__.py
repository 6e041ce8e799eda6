"""Facade: transformers of all dialects. On the module path that existing code imports; no logic."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.detection import APIType as APIType
from openenv.rollout.capture.sessions_api.transformers import AnthropicTransformer as AnthropicTransformer
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer
from openenv.rollout.capture.sessions_api.transformers import GoogleTransformer as GoogleTransformer
from openenv.rollout.capture.sessions_api.transformers import OpenAIChatTransformer as OpenAIChatTransformer
from openenv.rollout.capture.sessions_api.transformers import OpenAIResponsesTransformer as OpenAIResponsesTransformer
from openenv.rollout.capture.sessions_api.transformers import TransformManager as TransformManager

export_imports(__name__)
