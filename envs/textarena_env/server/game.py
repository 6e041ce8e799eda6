"""A game of TextArena with randomness of its own. Knows the library; must not know episodes or opponents.

The library draws from the global generators of `random` and NumPy, which all games of a process share. Each game here
puts its own state there for the time of a call, so the calls of all games must come from one thread.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import textarena
from pydantic_core import to_jsonable_python
from textarena.core import ObservationType
from textarena.envs.registration import ENV_REGISTRY

from textarena_env.models import TextArenaMessage

MOST_PLAYERS = 15
_NLTK = "python -m nltk.downloader words brown averaged_perceptron_tagger_eng"


class TextArenaGame:
    """A running game.

    Args:
        env_id: One of TextArena's ids.
        seed: Of everything that is left to chance.
        num_players: By default as few as the game takes.
        options: Arguments of the game.

    Raises:
        ValueError: There is no such game, or it cannot be made with these arguments or on this machine.
    """

    def __init__(self, env_id: str, *, seed: int, num_players: int | None, options: dict[str, Any]) -> None:
        if env_id not in ENV_REGISTRY:
            near = difflib.get_close_matches(env_id, ENV_REGISTRY, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see the list on textarena.ai"
            raise ValueError(f"there is no game {env_id!r}: {hint}")
        self.env_id = env_id
        self._random: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()
        self.rewards: dict[int, float] = {}
        self.is_over = False
        with self._own_randomness(), _explained(env_id):
            self._env: Any = textarena.make(env_id, **options)
            self.num_players = self._begin(seed, num_players)

    def _begin(self, seed: int, num_players: int | None) -> int:
        """Begin with a number of players; TextArena does not say which numbers a game takes."""
        refusals: list[Exception] = []
        for count in range(1, MOST_PLAYERS + 1) if num_players is None else [num_players]:
            try:
                self._env.reset(num_players=count, seed=seed)
                return count
            except (AssertionError, ValueError) as error:
                refusals.append(error)
        raise refusals[0]

    @property
    def current_player(self) -> int:
        """The player whose turn it is."""
        return int(self._env.state.current_player_id)

    @property
    def turn(self) -> int:
        """How many turns were taken."""
        return int(self._env.state.turn)

    @property
    def max_turns(self) -> int | None:
        """After how many turns the game ends, where it has a limit."""
        limit: int | None = self._env.state.max_turns
        return limit

    @property
    def raw_state(self) -> dict[str, Any]:
        """The game's own state, as far as JSON can express it."""
        state = self._env.state.game_state or {}
        return {str(key): to_jsonable_python(_plain(value), fallback=str) for key, value in state.items()}

    def take_messages(self, player: int) -> list[TextArenaMessage]:
        """Return the messages that a player has not seen yet."""
        inbox = self._env.state.observations[player]
        messages = [
            TextArenaMessage(sender_id=sender, content=str(content), category=_category(kind))
            for sender, content, kind in inbox
        ]
        inbox.clear()
        return messages

    def act(self, message: str) -> dict[str, Any]:
        """Let the current player say something; return what the game adds to it."""
        with self._own_randomness():
            self.is_over, info = self._env.step(message)
            if self.is_over:
                rewards, game_info = self._env.close()
                self.rewards = {int(player): float(reward) for player, reward in (rewards or {}).items()}
                info = {**(info or {}), "rewards": self.rewards, "players": game_info}
        return {str(key): to_jsonable_python(_plain(value), fallback=str) for key, value in (info or {}).items()}

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Let the library draw from this game's generators; what it prints goes nowhere."""
        shared = random.getstate(), np.random.get_state()
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            self._random, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(shared[0])
            np.random.set_state(shared[1])


@contextlib.contextmanager
def _explained(env_id: str) -> Iterator[None]:
    """Turn the many ways in which a game cannot be made into one error that says what to do."""
    try:
        yield
    except LookupError as error:
        if "nltk" not in str(error).lower():
            raise ValueError(f"{env_id} cannot be made: {error}") from error
        raise ValueError(f"{env_id} needs word lists that are not installed: {_NLTK}") from error
    except SyntaxError as error:
        raise ValueError(f"{env_id} needs a newer Python: {error}") from error
    except (AssertionError, ValueError, TypeError, ImportError, OSError) as error:
        raise ValueError(f"{env_id} cannot be made: {error}") from error


def _category(kind: Any) -> str:
    return kind.name if isinstance(kind, ObservationType) else str(kind)


def _plain(value: Any) -> Any:
    """Replace keys that JSON does not have: positions are tuples in many games."""
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple | set | frozenset) else value
