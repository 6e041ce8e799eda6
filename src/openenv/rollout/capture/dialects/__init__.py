"""Dialects of model endpoints: which module speaks which, and which request is meant by a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...task import Dialect
from . import (
    anthropic,
    anthropic_over_chat,
    openai_chat,
    openai_responses,
    responses_over_chat,
)
from .dialect import Bridge, DialectModule

DIALECTS: dict[Dialect, DialectModule] = {
    "openai_chat": openai_chat,
    "openai_responses": openai_responses,
    "anthropic": anthropic,
}
BRIDGES: dict[tuple[Dialect, Dialect], Bridge] = {
    ("anthropic", "openai_chat"): anthropic_over_chat,
    ("openai_responses", "openai_chat"): responses_over_chat,
}
"""What lets an agent of one dialect talk to an endpoint of another."""
COUNTS: dict[str, DialectModule] = {
    anthropic.COUNT_PATH: anthropic,
    openai_responses.COUNT_PATH: openai_responses,
}


@dataclass(frozen=True, slots=True)
class Route:
    """What a path asks for."""

    dialect: DialectModule
    kind: Literal["call", "count"] = "call"


def route(path: str) -> Route | None:
    """Return what a path asks for, whatever its prefix; None for a path that no dialect has."""
    path = path.rstrip("/")
    for ending, module in COUNTS.items():
        if path.endswith(ending):
            return Route(module, "count")
    for module in DIALECTS.values():
        if path.endswith(module.PATH):
            return Route(module)
    return None
