"""Facade: rubrics that ask a model. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.rubrics.llm_judge import LLMJudge as LLMJudge
from openenv.env.rubrics.rubric import Rubric as Rubric

export_imports(__name__)
