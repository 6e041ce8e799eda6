"""What a rollout has spent on its model, and whether it may spend more.

Knows numbers and a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from openenv.rollout.task import Budget

EXHAUSTED = "Step budget exhausted; stopping."
"""What the agent is told in place of an answer."""


@dataclass(slots=True)
class Spending:
    """The account of one rollout. Calls that run at the same time may exceed the tokens by what they sample."""

    budget: Budget
    clock: Callable[[], float] = time.monotonic
    calls: int = 0
    completion_tokens: int = 0
    started_at: float | None = None
    refused: int = 0
    """How many calls were answered by the budget."""

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    @property
    def seconds(self) -> float:
        """Return how long the rollout has been open."""
        return self.clock() - (self.started_at or 0.0)

    def exhausted(self) -> str | None:
        """Return which limit is reached: `calls`, `completion_tokens` or `seconds`; None while there is some left."""
        limits = self.budget
        if limits.max_calls is not None and self.calls >= limits.max_calls:
            return "calls"
        if limits.max_completion_tokens is not None and self.completion_tokens >= limits.max_completion_tokens:
            return "completion_tokens"
        if limits.max_seconds is not None and self.seconds >= limits.max_seconds:
            return "seconds"
        return None

    def tokens_left(self) -> int | None:
        """Return how many tokens may still be sampled; None for no limit."""
        if self.budget.max_completion_tokens is None:
            return None
        return max(0, self.budget.max_completion_tokens - self.completion_tokens)
