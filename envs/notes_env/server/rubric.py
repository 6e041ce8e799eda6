"""The reward: nothing before the work is handed in, then how much of it is right. Knows the desk only."""

from __future__ import annotations

from typing import Any

from notes_env.server.desk import Desk
from openenv.core.rubrics import Gate, Rubric, Sequential, WeightedSum


class OfDesk(Rubric):
    """A rubric that looks at the notes and not at what was said."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk


class Submitted(OfDesk):
    """1 once the work is handed in."""

    def forward(self, action: Any, observation: Any) -> float:
        """Look whether it is."""
        return float(self._desk.is_submitted)


class Progress(OfDesk):
    """The share of the wanted notes that are right."""

    def forward(self, action: Any, observation: Any) -> float:
        """Compare the notes with the task."""
        return self._desk.progress()


class Care(OfDesk):
    """1 when no other note was touched."""

    def forward(self, action: Any, observation: Any) -> float:
        """Compare the other notes with those at the beginning."""
        return float(self._desk.is_tidy())


def notes_rubric(desk: Desk) -> Sequential:
    """Build the reward: 0.7 for progress, 0.3 for care; nothing where nothing is done or not yet handed in."""
    quality = WeightedSum([Progress(desk), Gate(Care(desk))], weights=[0.7, 0.3])
    return Sequential(Submitted(desk), Progress(desk), quality)
