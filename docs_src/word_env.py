"""A word game: guess five letters in six tries."""

from __future__ import annotations

import random
import uuid
from typing import Any

from pydantic import Field

from openenv import Action, Environment, Observation, State

WORDS = ("apple", "brick", "cloud", "dance", "eagle", "flame")
TRIES = 6


# region: models
class WordAction(Action):
    guess: str = Field(min_length=5, max_length=5)


class WordObservation(Observation):
    marks: str = ""  # per letter: = correct, ~ in another place, . not in the word
    tries_left: int = TRIES


class WordState(State):
    word: str = ""


# endregion


# region: environment
class WordGame(Environment[WordAction, WordObservation, WordState]):
    """Guess a word of five letters."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # instances share nothing

    def __init__(self) -> None:
        super().__init__()
        self._state = WordState()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> WordObservation:
        word = random.Random(seed).choice(WORDS)
        self._state = WordState(episode_id=episode_id or str(uuid.uuid4()), word=word)
        return WordObservation()

    def step(self, action: WordAction, timeout_s: float | None = None, **kwargs: Any) -> WordObservation:
        self._state.step_count += 1
        marks = mark(action.guess, self._state.word)
        left = TRIES - self._state.step_count
        solved = marks == "====="
        return WordObservation(
            marks=marks,
            tries_left=left,
            reward=1.0 if solved else 0.0,
            done=solved or left == 0,
            terminated=solved,
            truncated=left == 0 and not solved,
        )

    @property
    def state(self) -> WordState:
        return self._state


def mark(guess: str, word: str) -> str:
    return "".join("=" if a == b else "~" if a in word else "." for a, b in zip(guess, word, strict=True))


# endregion
