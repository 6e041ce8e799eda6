"""The counter's models."""

from __future__ import annotations

from pydantic import Field

from openenv.core.env_server.types import Action, Observation, State


class CounterAction(Action):
    """Add an amount, or fail with a message."""

    amount: int = Field(ge=-100, le=100)
    fail: str | None = None


class CounterObservation(Observation):
    """The total so far, and how the episode began."""

    total: int
    seed: int | None = None
    note: str = "—"


class CounterState(State):
    """The total and all amounts."""

    total: int = 0
    amounts: list[int] = Field(default_factory=list)
