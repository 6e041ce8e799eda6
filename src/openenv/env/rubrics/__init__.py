"""Reward composition: rubrics score an (action, observation) pair and nest into trees.

Knows how scores are computed and combined. Must not know about servers, sessions, clients or wire formats.
"""

from __future__ import annotations

from .containers import Gate, RubricDict, RubricList, Sequential, WeightedSum
from .llm_judge import CachedClient, CompletionClient, LLMJudge, ScoreParseError
from .rubric import ExponentialDiscountingTrajectoryRubric, ForwardHook, ForwardPreHook, Rubric, TrajectoryRubric

__all__ = [
    "CachedClient",
    "CompletionClient",
    "ExponentialDiscountingTrajectoryRubric",
    "ForwardHook",
    "ForwardPreHook",
    "Gate",
    "LLMJudge",
    "Rubric",
    "RubricDict",
    "RubricList",
    "ScoreParseError",
    "Sequential",
    "TrajectoryRubric",
    "WeightedSum",
]
