"""Reward composition: rubrics score an (action, observation) pair and nest into trees.

Knows how scores are computed and combined. Must not know about servers, sessions, clients or wire formats.
"""

from __future__ import annotations

from .base import ForwardHook, ForwardPreHook, Rubric
from .containers import Gate, RubricDict, RubricList, Sequential, WeightedSum
from .llm_judge import CompletionClient, LLMJudge, ScoreParseError
from .trajectory import ExponentialDiscountingTrajectoryRubric, TrajectoryRubric

__all__ = [
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
