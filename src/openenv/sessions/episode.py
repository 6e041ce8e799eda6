"""What an orchestrator may know of an episode that somebody else plays. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Episode:
    """Reward and end of a session's running episode, as its steps have told."""

    steps: int = 0
    reward: float | None = None
    total_reward: float = 0.0
    done: bool = False

    def record(self, reward: float | None, *, done: bool) -> None:
        """Take in one step."""
        self.steps += 1
        self.reward = reward
        self.total_reward += reward or 0.0
        self.done = done
