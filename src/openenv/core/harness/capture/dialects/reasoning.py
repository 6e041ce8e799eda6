"""Facade: reasoning in messages. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.dialects.content import decrypt_reasoning as decrypt_reasoning
from openenv.rollout.capture.dialects.content import encrypt_reasoning as encrypt_reasoning
from openenv.rollout.capture.dialects.content import (
    extract_reasoning_from_anthropic_content as extract_reasoning_from_anthropic_content,
)
from openenv.rollout.capture.dialects.content import (
    extract_reasoning_from_gemini_parts as extract_reasoning_from_gemini_parts,
)
from openenv.rollout.capture.dialects.content import (
    extract_reasoning_from_responses_item as extract_reasoning_from_responses_item,
)
from openenv.rollout.capture.dialects.content import make_google_signature as make_google_signature
from openenv.rollout.capture.dialects.content import make_signature as make_signature

export_imports(__name__)
