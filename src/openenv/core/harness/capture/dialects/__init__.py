"""Facade: transformers of all dialects. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.rollout.capture.sessions_api.detection import APIType as APIType
    from openenv.rollout.capture.sessions_api.transformers import AnthropicTransformer as AnthropicTransformer
    from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer
    from openenv.rollout.capture.sessions_api.transformers import GoogleTransformer as GoogleTransformer
    from openenv.rollout.capture.sessions_api.transformers import OpenAIChatTransformer as OpenAIChatTransformer
    from openenv.rollout.capture.sessions_api.transformers import (
        OpenAIResponsesTransformer as OpenAIResponsesTransformer,
    )
    from openenv.rollout.capture.sessions_api.transformers import TransformManager as TransformManager

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.rollout.capture.sessions_api.detection": "APIType",
                "openenv.rollout.capture.sessions_api.transformers": """
                AnthropicTransformer BaseTransformer GoogleTransformer OpenAIChatTransformer
                OpenAIResponsesTransformer TransformManager
            """,
            }
        ),
    )
