"""An environment with images: each step answers 84x84x4 bytes, as a stack of game frames does."""

from __future__ import annotations

from typing import Any

import numpy as np

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class PixelAction(Action):
    """Choose nothing."""


class PixelObservation(Observation):
    """Carry an image."""

    pixels: Any = None


class PixelEnvironment(Environment[PixelAction, PixelObservation, State]):
    """Return the same noise with a reward of 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._pixels = np.random.default_rng(1).integers(0, 256, (84, 84, 4), dtype=np.uint8)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> PixelObservation:
        """Start an episode."""
        return PixelObservation(pixels=self._pixels, reward=0.0)

    def step(self, action: PixelAction, timeout_s: float | None = None, **kwargs: Any) -> PixelObservation:
        """Show the image."""
        return PixelObservation(pixels=self._pixels, reward=1.0)

    @property
    def state(self) -> State:
        """Return nothing of interest."""
        return State()


app = create_app(PixelEnvironment, PixelAction, PixelObservation, env_name="pixels", max_concurrent_envs=1000)
