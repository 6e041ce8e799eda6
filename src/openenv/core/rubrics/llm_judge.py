"""Facade: a model as judge. Re-exports only; the code lives in `openenv.rubrics.llm_judge`."""

from __future__ import annotations

from openenv.rubrics.base import (
    Rubric,
)
from openenv.rubrics.llm_judge import (
    LLMJudge,
)

__all__ = [
    "LLMJudge",
    "Rubric",
]
