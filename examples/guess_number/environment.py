"""Guess a secret number by hints: an episode of several turns in plain text.

python -m openenv serve examples/guess_number/environment.py:app --max-sessions 512
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

from openenv import Environment, create_app
from openenv.types import Action, Observation, State

HIGHEST = 64
GUESSES = 8


class Answer(Action):
    text: str


class Hint(Observation):
    text: str = ""


class GuessNumber(Environment[Answer, Hint, State]):
    """A number is to be found; fewer guesses earn more. If it is not found, what was learned of it earns up to 0.3."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._secret = self._low = 1
        self._high = HIGHEST

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._state = State(episode_id=episode_id)
        self._secret = random.Random(seed).randint(1, HIGHEST)
        self._low, self._high = 1, HIGHEST
        return Hint(text=f"The number is between 1 and {HIGHEST}.")

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        found = re.search(r"\d{1,3}", action.text)
        guess = int(found[0]) if found else None
        if guess == self._secret:
            return Hint(text="Right!", reward=1.0 - 0.1 * (self._state.step_count - 1), done=True)
        if guess is None:
            text = "Answer with a number."
        elif guess < self._secret:
            self._low = max(self._low, guess + 1)
            text = f"{guess} is too low."
        else:
            self._high = min(self._high, guess - 1)
            text = f"{guess} is too high."
        text += f" The number is between {self._low} and {self._high}."
        if self._state.step_count < GUESSES:
            return Hint(text=text, reward=0.0)
        return Hint(text=text, reward=0.3 * self._narrowed(), done=True)

    def _narrowed(self) -> float:
        """Return how far the number is narrowed down: 0 at the beginning, 1 where one is left."""
        return 1.0 - math.log(self._high - self._low + 1) / math.log(HIGHEST)

    @property
    def state(self) -> State:
        return self._state


app = create_app(GuessNumber, Answer, Hint, max_concurrent_envs=4096)
