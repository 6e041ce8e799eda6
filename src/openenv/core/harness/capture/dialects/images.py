"""Facade: texts and images of messages. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.dialects.content import (
    anthropic_content_to_openai_chat as anthropic_content_to_openai_chat,
)
from openenv.rollout.capture.dialects.content import anthropic_document_to_text as anthropic_document_to_text
from openenv.rollout.capture.dialects.content import anthropic_image_to_openai_chat as anthropic_image_to_openai_chat
from openenv.rollout.capture.dialects.content import (
    google_content_parts_to_openai_chat as google_content_parts_to_openai_chat,
)
from openenv.rollout.capture.dialects.content import google_part_to_openai_chat as google_part_to_openai_chat
from openenv.rollout.capture.dialects.content import is_image_mime_type as is_image_mime_type
from openenv.rollout.capture.dialects.content import make_data_url as make_data_url
from openenv.rollout.capture.dialects.content import (
    openai_chat_content_to_anthropic_blocks as openai_chat_content_to_anthropic_blocks,
)
from openenv.rollout.capture.dialects.content import (
    openai_chat_content_to_google_parts as openai_chat_content_to_google_parts,
)
from openenv.rollout.capture.dialects.content import openai_chat_image_to_anthropic as openai_chat_image_to_anthropic
from openenv.rollout.capture.dialects.content import openai_chat_image_to_google as openai_chat_image_to_google
from openenv.rollout.capture.dialects.content import (
    openai_content_from_text_and_images as openai_content_from_text_and_images,
)
from openenv.rollout.capture.dialects.content import openai_image_detail as openai_image_detail
from openenv.rollout.capture.dialects.content import openai_image_url as openai_image_url
from openenv.rollout.capture.dialects.content import openai_image_url_block as openai_image_url_block
from openenv.rollout.capture.dialects.content import (
    openai_responses_input_content_to_chat as openai_responses_input_content_to_chat,
)
from openenv.rollout.capture.dialects.content import openai_text_block as openai_text_block
from openenv.rollout.capture.dialects.content import parse_data_url as parse_data_url

export_imports(__name__)
