"""What the Gridworld is sent, what it answers and what it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from openenv.core.env_server.types import Action, Observation, State

Move = Literal["up", "down", "left", "right"]
Event = Literal["start", "moved", "bumped", "goal", "pit", "timeout"]
Cell = tuple[int, int]
"""Row and column, from the top left."""

FLOOR, WALL, PIT, GOAL = ".", "#", "o", "G"
OFFSETS: dict[Move, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class GridworldAction(Action):
    """One move."""

    move: Move = Field(description="Where to go")


class GridworldObservation(Observation):
    """The board after a move."""

    board: str = Field(default="", description="The board, drawn as text")
    tiles: list[str] = Field(default_factory=list, description="Rows of floor (.), wall (#), pit (o) and goal (G)")
    position: Cell = Field(default=(0, 0), description="Row and column of the agent")
    event: Event = Field(default="start", description="What the last move led to")
    steps_left: int = Field(default=0, ge=0, description="Moves left before the episode is cut off")


class GridworldState(State):
    """The whole episode, for debugging and orchestration."""

    seed: int | None = Field(default=None, description="The seed that makes this map again")
    size: int = Field(default=0, ge=0, description="Rows and columns of the board")
    position: Cell = Field(default=(0, 0), description="Where the agent is")
    goal: Cell = Field(default=(0, 0), description="Where it should get to")
    shortest_path: int = Field(default=0, ge=0, description="Moves from start to goal on the best way")
    max_steps: int = Field(default=0, ge=0, description="Moves after which the episode is cut off")
    total_reward: float = Field(default=0.0, description="Sum of the rewards so far")
    scores: dict[str, float] = Field(default_factory=dict, description="What each rubric gave for the last move")
