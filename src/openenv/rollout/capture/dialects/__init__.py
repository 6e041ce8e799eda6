"""Dialects of model endpoints: which there are, which bridges lead from one to another, and what a path asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...task import Dialect
from .anthropic import AnthropicMessages
from .anthropic_over_chat import ANTHROPIC_OVER_CHAT
from .dialect import Bridge, ModelDialect
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses
from .responses_over_chat import RESPONSES_OVER_CHAT

DIALECTS: dict[Dialect, ModelDialect] = {
    "openai_chat": OpenAIChat(),
    "openai_responses": OpenAIResponses(),
    "anthropic": AnthropicMessages(),
}
BRIDGES: dict[tuple[Dialect, Dialect], Bridge] = {
    ("anthropic", "openai_chat"): ANTHROPIC_OVER_CHAT,
    ("openai_responses", "openai_chat"): RESPONSES_OVER_CHAT,
}
"""By the dialects of the agent and of the endpoint."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a path asks for."""

    dialect: ModelDialect
    kind: Literal["call", "count"] = "call"


def route(path: str) -> Route | None:
    """Return what a path asks for, whatever its prefix; None for a path that no dialect has."""
    path = path.rstrip("/")
    for dialect in DIALECTS.values():
        if path.endswith(dialect.path):
            return Route(dialect)
        if dialect.count_path is not None and path.endswith(dialect.count_path):
            return Route(dialect, "count")
    return None
