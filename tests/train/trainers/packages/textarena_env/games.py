"""The server's side: Wordle and Sudoku, as far as an example plays them."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from . import TextArenaAction, TextArenaMessage, TextArenaObservation

TARGET = "crane"
ROW = "R{} 1 2 3 | 4 5 6 | 7 8 ."


class TextGame(Environment[TextArenaAction, TextArenaObservation, State]):
    """A game whose observation is everything that was said."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    opening = ""

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self.said = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TextArenaObservation:
        """Begin a game."""
        self._state = State(episode_id=episode_id)
        self.said = self.opening
        return self.seen()

    def seen(self, **fields: Any) -> TextArenaObservation:
        """Return everything that was said."""
        return TextArenaObservation(prompt=self.opening, messages=[TextArenaMessage(content=self.said)], **fields)

    @property
    def state(self) -> State:
        """The number of moves."""
        return self._state


class Wordle(TextGame):
    """Guess a word in six tries."""

    opening = "Guess the word."

    def step(self, action: TextArenaAction, timeout_s: float | None = None, **kwargs: Any) -> TextArenaObservation:
        """Take a guess, such as `[slate]`."""
        guess = action.message.strip("[]")
        self._state.step_count += 1
        marks = "".join("G" if a == b else "Y" if a in TARGET else "X" for a, b in zip(guess, TARGET, strict=False))
        self.said += f"\n{guess}: {marks}"
        right = guess == TARGET
        reward = 1.0 if right else marks.count("G") / 10
        return self.seen(reward=reward, done=right or self._state.step_count == 6)


class Sudoku(TextGame):
    """Fill the board; the right number is 9 everywhere."""

    opening = "C1 C2 C3\n" + "\n".join(ROW.format(number) for number in range(1, 10))

    def step(self, action: TextArenaAction, timeout_s: float | None = None, **kwargs: Any) -> TextArenaObservation:
        """Place a number, such as `[1 9 9]`."""
        self._state.step_count += 1
        row, column, number = action.message.strip("[]").split()
        is_right = column == number == "9"
        board = self.opening.replace(ROW.format(row), ROW.format(row).replace(".", "9")) if is_right else ""
        self.said += f"\n{board}" if is_right else "\nThat is an invalid move."
        return self.seen(reward=float(is_right), done=self._state.step_count == 9)
