"""Facade: the transformer of Google's generateContent. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.dialects.content import (
    extract_reasoning_from_gemini_parts as extract_reasoning_from_gemini_parts,
)
from openenv.rollout.capture.dialects.content import (
    google_content_parts_to_openai_chat as google_content_parts_to_openai_chat,
)
from openenv.rollout.capture.dialects.content import google_part_to_openai_chat as google_part_to_openai_chat
from openenv.rollout.capture.dialects.content import make_google_signature as make_google_signature
from openenv.rollout.capture.dialects.content import (
    openai_chat_content_to_google_parts as openai_chat_content_to_google_parts,
)
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer
from openenv.rollout.capture.sessions_api.transformers import GoogleTransformer as GoogleTransformer

export_imports(__name__)
