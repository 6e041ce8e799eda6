"""The server's side: Catch, on ten rows of five columns."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from .models import OpenSpielAction, OpenSpielObservation

ROWS, COLUMNS = 10, 5


class Catch(Environment[OpenSpielAction, OpenSpielObservation, State]):
    """A ball falls in the first column; the paddle begins in the third."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self.paddle = 2

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> OpenSpielObservation:
        """Let a ball fall."""
        self._state = State(episode_id=episode_id)
        self.paddle = 2
        return self.seen()

    def step(self, action: OpenSpielAction, timeout_s: float | None = None, **kwargs: Any) -> OpenSpielObservation:
        """Move to the left (0) or to the right (2), or stay (1)."""
        self._state.step_count += 1
        self.paddle = min(COLUMNS - 1, max(0, self.paddle + action.action_id - 1))
        if self._state.step_count < ROWS - 1:
            return self.seen(reward=0.0)
        return self.seen(reward=1.0 if self.paddle == 0 else -1.0, done=True)

    def seen(self, **fields: Any) -> OpenSpielObservation:
        """Return the board."""
        board = [0.0] * (ROWS * COLUMNS)
        board[self._state.step_count * COLUMNS] = 1.0
        board[(ROWS - 1) * COLUMNS + self.paddle] = 1.0
        return OpenSpielObservation(info_state=board, legal_actions=[0, 1, 2], **fields)

    @property
    def state(self) -> State:
        """The number of moves."""
        return self._state
