"""Facade: the transformer of chat completions. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer
from openenv.rollout.capture.sessions_api.transformers import OpenAIChatTransformer as OpenAIChatTransformer

export_imports(__name__)
