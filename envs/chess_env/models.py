"""What the Chess environment is sent, what it answers and what it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from openenv import Action, Observation, State

Color = Literal["white", "black"]
OpponentName = Literal["auto", "engine", "search", "random"]


class ChessAction(Action):
    """One move."""

    move: str = Field(
        max_length=16, description="In UCI notation (e2e4, e7e8q) or in SAN (e4, Nf3, O-O)", examples=["e2e4"]
    )


class ChessObservation(Observation):
    """The position after the opponent's reply."""

    fen: str = Field(default="", description="The position in Forsyth-Edwards notation")
    board: str = Field(default="", description="The board, drawn as text, white at the bottom")
    color: Color = Field(default="white", description="The side that you play")
    legal_moves: list[str] = Field(default_factory=list, description="The moves that you may make, in UCI notation")
    is_check: bool = Field(default=False, description="Whether your king is in check")
    opponent_move: str | None = Field(default=None, description="The opponent's last move, in UCI notation")
    result: str | None = Field(default=None, description="1-0, 0-1 or 1/2-1/2 once the game is over")
    error: str | None = Field(default=None, description="Why the last move was not made")


class ChessState(State):
    """The running game."""

    fen: str = Field(default="", description="The position")
    color: Color = Field(default="white", description="The side of the agent")
    moves: list[str] = Field(default_factory=list, description="The moves of both sides, in UCI notation")
    opponent: str = Field(default="", description="Who plays the other side")
    illegal_moves: int = Field(default=0, ge=0, description="How many moves of the agent were not legal")
    result: str | None = Field(default=None, description="1-0, 0-1 or 1/2-1/2 once the game is over")
