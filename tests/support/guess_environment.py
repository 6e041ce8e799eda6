"""A game of words that tests of trainers play."""

from __future__ import annotations

from typing import Any

from environments import Idle
from openenv.types import Action, Observation


class Word(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class Guess(Idle):
    """Ends with the word `yes`; each other word costs, and `crash` breaks the environment."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        return Hint(hint=f"Begin {seed}.")

    def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.text == "crash":
            raise RuntimeError("broken")
        is_right = action.text == "yes"
        return Hint(hint=f"{action.text} is wrong.", reward=1.0 if is_right else -0.25, done=is_right)
