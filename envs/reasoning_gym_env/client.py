"""The typed client of the Reasoning Gym environment."""

from __future__ import annotations

from openenv import EnvClient
from reasoning_gym_env.models import ReasoningGymAction, ReasoningGymObservation, ReasoningGymState


class ReasoningGymEnv(EnvClient[ReasoningGymAction, ReasoningGymObservation, ReasoningGymState]):
    """Answers questions of a server."""
