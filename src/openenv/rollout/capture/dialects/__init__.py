"""The tables of dialects: by name, by path, and the bridges between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from ...tasks.model_parameters import AgentDialectName, Dialect
from . import google, responses_over_chat
from .anthropic import AnthropicMessages
from .anthropic_over_chat import ANTHROPIC_OVER_CHAT
from .chat_over_anthropic import CHAT_OVER_ANTHROPIC, chained
from .dialect import AgentDialect, Bridge, ModelDialect
from .google import ACTIONS, GOOGLE_OVER_CHAT, ContentTranslator, GoogleGenerate, action_of
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses
from .responses_over_chat import RESPONSES_OVER_CHAT, ResponseTranslator

DIALECTS: dict[Dialect, ModelDialect] = {
    "openai_chat": OpenAIChat(),
    "openai_responses": OpenAIResponses(),
    "anthropic": AnthropicMessages(),
}
AGENT_DIALECTS: dict[AgentDialectName, AgentDialect] = {
    **{dialect.name: dialect for dialect in DIALECTS.values()},
    "google": GoogleGenerate(),
}
# An agent and an endpoint of one dialect need no bridge. Chat completions are the hub of all others:
#
#     responses ---+
#     Anthropic ---+--> chat completions --> Anthropic
#     Google ------+
#
# An endpoint with responses serves agents with responses only.
BRIDGES: dict[tuple[AgentDialectName, Dialect], Bridge] = {
    ("anthropic", "openai_chat"): ANTHROPIC_OVER_CHAT,
    ("openai_responses", "openai_chat"): RESPONSES_OVER_CHAT,
    ("google", "openai_chat"): GOOGLE_OVER_CHAT,
    ("openai_chat", "anthropic"): CHAT_OVER_ANTHROPIC,
    ("openai_responses", "anthropic"): chained(responses_over_chat.request, ResponseTranslator),
    ("google", "anthropic"): chained(google.request, ContentTranslator),
}
"""Keys are (agent's dialect, endpoint's dialect)."""


@dataclass(frozen=True, slots=True)
class Route:
    """The meaning of a path: its dialect, and whether to answer or only count tokens."""

    dialect: AgentDialect
    kind: Literal["call", "count"] = "call"


def route(path: str) -> Route | None:
    """Return the route of a path with any prefix; None if no dialect has this path."""
    # /v1/chat/completions, /openai/v1/chat/completions, /chat/completions: clients differ in the prefix they add.
    path = path.rstrip("/")
    for dialect in DIALECTS.values():
        if path.endswith(dialect.path):
            return Route(dialect)
        if dialect.count_path is not None and path.endswith(dialect.count_path):
            return Route(dialect, "count")
    action = action_of(path)
    if action is None:
        return None
    return Route(AGENT_DIALECTS["google"], cast("Literal['call', 'count']", ACTIONS[action]))
