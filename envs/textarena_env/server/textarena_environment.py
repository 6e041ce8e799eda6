"""The TextArena environment: games, the other players, and rewards. A single game is elsewhere."""

from __future__ import annotations

import html
import random
import re
import secrets
import uuid
from collections.abc import Callable
from typing import Any

from typing_extensions import TypedDict

from openenv import Environment
from openenv.core.env_server.types import EnvironmentMetadata
from openenv.env.tasks import TaskCatalogue
from textarena_env.models import TextArenaAction, TextArenaMessage, TextArenaObservation, TextArenaState
from textarena_env.server.game import TextArenaGame

DEFAULT_GAME = "GuessTheNumber-v0"
MAX_STEPS = 200
SPLITS = {"train": range(1000), "test": range(1_000_000, 1_000_100)}
"""The seeds of each split."""
_MOST_OPPONENT_TURNS = 1000
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")

Player = Callable[[str], str]
"""Answers the messages of a turn with what a player says, as TextArena's agents do."""


class Task(TypedDict):
    """A seed of a split; `reset(split=..., index=...)` or `reset(seed=...)` begins it."""

    split: str
    index: int
    env_id: str
    seed: int


class TextArenaEnvironment(TaskCatalogue[Task], Environment[TextArenaAction, TextArenaObservation, TextArenaState]):
    """Play a game in words, alone or against others.

    Args:
        env_id: The game of episodes that name none.
        num_players: How many play it; by default as few as it takes.
        opponent: Plays the other players where a reset asks for `opponent="server"`, its default then.
    """

    SPLITS = SPLITS

    SUPPORTS_CONCURRENT_SESSIONS = True
    REQUIRES_SINGLE_THREAD_EXECUTOR = True  # games share the global generators of `random`

    def __init__(
        self, env_id: str = DEFAULT_GAME, num_players: int | None = None, opponent: Player | None = None
    ) -> None:
        super().__init__()
        self._default_id, self._default_players, self._server_opponent = env_id, num_players, opponent
        self._game: TextArenaGame | None = None
        self._chance = random.Random(0)
        self._opponent, self._player, self._most_steps = "random", 0, 0
        self._prompts: dict[int, str] = {}
        self._is_over = True
        self._state = TextArenaState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        env_id: str | None = None,
        num_players: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
        opponent: str | None = None,
        player_id: int = 0,
        max_steps: int = MAX_STEPS,
        split: str | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> TextArenaObservation:
        """Begin a game.

        Args:
            seed: Of everything that is left to chance; drawn if there is none.
            episode_id: A name for the episode.
            env_id: Which game; by default the server's own.
            num_players: How many play; by default as few as the game takes.
            env_kwargs: Arguments of the game.
            opponent: `random` for moves that the messages show in brackets, `self` to play all sides, `server` for
                the player that the server was started with.
            player_id: Which player you are, unless you play all.
            max_steps: After how many steps the game is cut off.
            split: Takes the seed from the tasks of a split.
            index: Which task of the split.

        Raises:
            ValueError: An argument is not possible, or the game cannot be made.
            IndexError: The split has no such task.
        """
        if split is not None:
            seed = _seed(split, index)
        seed = secrets.randbelow(2**31) if seed is None else seed
        policy = opponent or ("random" if self._server_opponent is None else "server")
        if policy not in ("random", "self", "server") or (policy == "server" and self._server_opponent is None):
            raise ValueError(f"opponent must be random or self, or server where the server has one, not {policy!r}")
        if max_steps < 1:
            raise ValueError(f"max_steps must be 1 or more, not {max_steps}")
        game_id = env_id or self._default_id
        players = num_players or (self._default_players if env_id is None else None)
        game = TextArenaGame(game_id, seed=seed, num_players=players, options=env_kwargs or {})
        if not 0 <= player_id < game.num_players:
            raise ValueError(f"player_id must be between 0 and {game.num_players - 1}, not {player_id}")
        self._game, self._chance = game, random.Random(seed)
        self._opponent, self._player, self._most_steps = policy, player_id, max_steps
        self._prompts, self._is_over = {}, False
        self._state = TextArenaState(
            episode_id=episode_id or str(uuid.uuid4()),
            env_id=game_id,
            num_players=game.num_players,
            max_turns=game.max_turns,
        )
        self._let_others_play(game)
        return self._observe(game, {})

    def step(self, action: TextArenaAction, timeout_s: float | None = None, **kwargs: Any) -> TextArenaObservation:
        """Say something; the others answer until it is your turn again.

        Raises:
            RuntimeError: No game is running.
        """
        game = self._game
        if game is None or self._is_over:
            raise RuntimeError("no episode is running: call reset first")
        info = game.act(action.message)
        if not game.is_over:
            info = self._let_others_play(game) or info
        self._state.step_count += 1
        observation = self._observe(game, info)
        observation.terminated = game.is_over
        observation.truncated = not game.is_over and self._state.step_count >= self._most_steps
        observation.done = self._is_over = observation.terminated or observation.truncated
        observation.reward = game.rewards.get(self._player, 0.0)
        self._state.turn, self._state.last_reward, self._state.last_info = game.turn, observation.reward, info
        return observation

    def _let_others_play(self, game: TextArenaGame) -> dict[str, Any]:
        """Take the turns of the other players; return what the game added to the last one."""
        info: dict[str, Any] = {}
        for _ in range(_MOST_OPPONENT_TURNS):
            player = game.current_player
            if game.is_over or self._opponent == "self" or player == self._player:
                return info
            messages = self._read(game, player)
            info = game.act(self._answer(player, messages))
        raise RuntimeError(f"the others took {_MOST_OPPONENT_TURNS} turns in {game.env_id}, and none was yours")

    def _answer(self, player: int, messages: list[TextArenaMessage]) -> str:
        text = "\n".join(message.content for message in messages)
        if self._opponent == "server" and self._server_opponent is not None:
            return self._server_opponent(f"{self._prompts.get(player, '')}\n{text}")
        return self._chance.choice(_moves_in(text) or _moves_in(self._prompts.get(player, "")) or ["[0]"])

    def _read(self, game: TextArenaGame, player: int) -> list[TextArenaMessage]:
        """Take a player's new messages; the rules are kept for later turns."""
        messages = game.take_messages(player)
        rules = [message.content for message in messages if message.category == "PROMPT"]
        if rules:
            self._prompts[player] = "\n".join(rules)
        return messages

    def _observe(self, game: TextArenaGame, info: dict[str, Any]) -> TextArenaObservation:
        player = game.current_player if self._opponent == "self" else self._player
        messages = self._read(game, player)
        return TextArenaObservation(
            prompt=self._prompts.get(player, ""),
            messages=messages,
            current_player_id=game.current_player,
            legal_players=list(range(game.num_players)) if self._opponent == "self" else [self._player],
            info=info,
            reward=0.0,
        )

    @property
    def state(self) -> TextArenaState:
        """The running game, secrets included."""
        if self._game is not None:
            self._state.raw_state = self._game.raw_state
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="textarena_env",
            description=f"Games in words; {self._default_id} if a reset names no other.",
            version="0.11.0",
        )

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Show the messages as a chat."""
        messages = observation.get("messages")
        if not messages:
            return None
        return _STYLE + "".join(_bubble(message) for message in messages)

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer the moves that the messages show in brackets."""
        text = "\n".join(message["content"] for message in observation.get("messages", []))
        return [(move, {"message": move}) for move in _moves_in(text)[:12]]

    # -- tasks ----------------------------------------------------------------------------------------------------

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(_seeds(split))

    def get_task(self, split: str, index: int) -> Task:
        """Return one task."""
        return Task(split=split, index=index, env_id=self._default_id, seed=_seed(split, index))


def _seeds(split: str) -> range:
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    return SPLITS[split]


def _seed(split: str, index: int) -> int:
    seeds = _seeds(split)
    if not 0 <= index < len(seeds):
        raise IndexError(f"{split} has tasks 0 to {len(seeds) - 1}, not {index}")
    return seeds[index]


def _moves_in(text: str) -> list[str]:
    """Return what a text has in square brackets, each once."""
    return list(dict.fromkeys(_BRACKETS.findall(text)))


def _bubble(message: dict[str, Any]) -> str:
    sender = message["sender_id"]
    name = "Game" if sender < 0 else f"Player {sender}"
    side = "game" if sender < 0 else "player"
    return f"<div class={side}><b>{name}</b><pre>{html.escape(message['content'])}</pre></div>"


_STYLE = """<style>
:root { color-scheme: light dark }
body { margin: 0; font: 14px/1.5 system-ui, sans-serif }
div { margin: 0 0 8px; padding: 8px 12px; border-radius: 10px; background: light-dark(#f4f1ea, #2c2f33) }
.player { margin-left: 48px; background: light-dark(#e3f1ee, #17352f) }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace }
</style>"""
