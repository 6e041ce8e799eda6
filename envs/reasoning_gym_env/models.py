"""What the Reasoning Gym environment is sent, what it answers and what it keeps."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from openenv import Action, Observation, State


class ReasoningGymAction(Action):
    """The answer to the question."""

    answer: str = Field(
        max_length=100_000, description="The answer alone, or a text with the answer in <answer>...</answer>"
    )


class ReasoningGymObservation(Observation):
    """A question, or what an answer is worth."""

    question: str | None = Field(default=None, description="The question; after a reset")
    score: float | None = Field(default=None, description="What the answer is worth, 0 to 1; after a step")
    correct_answer: str | None = Field(default=None, description="An answer that is right; after a step")
    dataset_metadata: dict[str, Any] | None = Field(default=None, description="How the question was made; after a step")


class ReasoningGymState(State):
    """The running episode."""

    dataset_name: str = Field(default="", description="The dataset that the question is from")
    seed: int | None = Field(default=None, description="The seed of the dataset")
    size: int = Field(default=0, ge=0, description="How many questions the dataset has")
    index: int = Field(default=0, ge=0, description="Which of them this one is")
