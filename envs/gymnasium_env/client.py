"""The typed client of the Gymnasium environment."""

from __future__ import annotations

from gymnasium_env.models import GymnasiumAction, GymnasiumObservation, GymnasiumState
from openenv import EnvClient


class GymnasiumEnv(EnvClient[GymnasiumAction, GymnasiumObservation, GymnasiumState]):
    """Plays any Gymnasium environment on a server."""
