"""What the TextArena environment is sent, what it answers and what it keeps."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from openenv import Action, Observation, State


class TextArenaMessage(BaseModel):
    """A message that a player gets."""

    sender_id: int = Field(description="The player, or -1 for the game")
    content: str = Field(description="The text")
    category: str = Field(description="What it is: PROMPT, PLAYER_ACTION, GAME_BOARD, GAME_MESSAGE, ...")


class TextArenaAction(Action):
    """What a player says; most games look for a move in square brackets."""

    message: str = Field(max_length=100_000, description="For example [5], or a sentence with [5] in it")


class TextArenaObservation(Observation):
    """The messages since the player's last turn."""

    prompt: str = Field(default="", description="The rules of the game, for this player")
    messages: list[TextArenaMessage] = Field(default_factory=list, description="The messages since the last turn")
    current_player_id: int = Field(default=0, description="The player whose turn it is")
    legal_players: list[int] = Field(default_factory=list, description="The players that this client plays")
    info: dict[str, Any] = Field(default_factory=dict, description="What the game adds; at the end all rewards")


class TextArenaState(State):
    """The running game."""

    env_id: str = Field(default="", description="The game")
    num_players: int = Field(default=0, ge=0, description="How many play")
    max_turns: int | None = Field(default=None, description="After how many turns the game ends, where it has a limit")
    turn: int = Field(default=0, ge=0, description="How many turns were taken")
    last_reward: float = Field(default=0.0, description="The reward of the last step")
    last_info: dict[str, Any] = Field(default_factory=dict, description="What the game added to the last step")
    raw_state: dict[str, Any] = Field(default_factory=dict, description="The game's own state, secrets included")
