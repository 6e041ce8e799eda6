"""The reward: what became of the episode, less the effort of the move. Knows observations only."""

from __future__ import annotations

from gridworld_env.models import Event, GridworldAction, GridworldObservation
from openenv.core.rubrics import Rubric, WeightedSum

_OUTCOMES: dict[Event, float] = {"goal": 1.0, "pit": -1.0}
_MOVE, _BUMP = -0.1, -0.5


class Outcome(Rubric):
    """1 for the goal, -1 for a pit, 0 on the way."""

    def forward(self, action: GridworldAction, observation: GridworldObservation) -> float:
        """Look at what the move led to."""
        return _OUTCOMES.get(observation.event, 0.0)


class Effort(Rubric):
    """A little off for each move, more for one into a wall."""

    def forward(self, action: GridworldAction, observation: GridworldObservation) -> float:
        """Look at whether the move got anywhere."""
        return _BUMP if observation.event == "bumped" else _MOVE


def gridworld_rubric() -> WeightedSum:
    """Build the reward: 0.9 for the goal, -0.9 for a pit, -0.01 for a move, -0.05 for a bump."""
    return WeightedSum([Outcome(), Effort()], weights=[0.9, 0.1])
