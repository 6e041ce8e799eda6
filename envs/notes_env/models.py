"""What the Notes environment answers to a reset and what it keeps; its actions are tool calls."""

from __future__ import annotations

from pydantic import Field

from openenv.core.env_server.types import Observation, State


class NotesObservation(Observation):
    """The beginning of an episode."""

    task_id: str = Field(default="", description="The task from the catalogue")
    instruction: str = Field(default="", description="What to do; the note called `task` says the same")
    titles: list[str] = Field(default_factory=list, description="The notes that there are")


class NotesState(State):
    """The whole episode, for debugging and orchestration; agents do not see it."""

    task_id: str | None = Field(default=None, description="The task from the catalogue")
    seed: int | None = Field(default=None, description="The seed that makes the same notes again")
    notes: dict[str, str] = Field(default_factory=dict, description="Every note by its title")
    is_submitted: bool = Field(default=False, description="Whether the work was handed in")
    progress: float = Field(default=0.0, ge=0.0, le=1.0, description="Share of the wanted notes that are right")
    total_reward: float = Field(default=0.0, description="Sum of the rewards so far")
    scores: dict[str, float] = Field(default_factory=dict, description="What each rubric gave for the last step")
