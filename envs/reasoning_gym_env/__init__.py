"""Reasoning Gym: questions that are made by a program, each with a score for the answer."""

from __future__ import annotations

from reasoning_gym_env.client import ReasoningGymEnv
from reasoning_gym_env.models import ReasoningGymAction, ReasoningGymObservation, ReasoningGymState

__all__ = ["ReasoningGymAction", "ReasoningGymEnv", "ReasoningGymObservation", "ReasoningGymState"]
