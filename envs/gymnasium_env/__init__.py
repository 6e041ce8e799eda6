"""Gymnasium: any of its environments, chosen when the server starts or when an episode begins."""

from __future__ import annotations

from gymnasium_env.client import GymnasiumEnv
from gymnasium_env.models import GymnasiumAction, GymnasiumObservation, GymnasiumState

__all__ = ["GymnasiumAction", "GymnasiumEnv", "GymnasiumObservation", "GymnasiumState"]
