"""Facade: a model as judge. Re-exports only; the code lives in `openenv.rubrics.llm_judge`."""

from __future__ import annotations

from openenv.rubrics.llm_judge import (
    LLMJudge,
)
from openenv.rubrics.rubric import Rubric

__all__ = [
    "LLMJudge",
    "Rubric",
]
