"""What the Gymnasium environment is sent, what it answers and what it keeps."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from openenv import Action, Observation, State


class GymnasiumAction(Action):
    """A value of the action space."""

    action: Any = Field(description="A number, or a list of numbers, as the action space of the episode describes")


class GymnasiumObservation(Observation):
    """A value of the observation space; with `render=True`, a picture is in the metadata."""

    observation: Any = Field(default=None, description="A number, an array, or a map or list of these")
    env_id: str = Field(default="", description="The Gymnasium environment of this episode")
    action_space: dict[str, Any] | None = Field(default=None, description="Which actions there are; after a reset")
    observation_space: dict[str, Any] | None = Field(default=None, description="What is observed; after a reset")


class GymnasiumState(State):
    """The running episode."""

    env_id: str = Field(default="", description="The Gymnasium environment of this episode")
    seed: int | None = Field(default=None, description="The seed of this episode")
    total_reward: float = Field(default=0.0, description="Sum of the rewards so far")
