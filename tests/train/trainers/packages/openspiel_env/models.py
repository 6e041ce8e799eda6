"""What the games are sent, and what they answer."""

from __future__ import annotations

from pydantic import Field

from openenv.core.env_server.types import Action, Observation


class OpenSpielAction(Action):
    """A move, by its number."""

    action_id: int
    game_name: str = "catch"


class OpenSpielObservation(Observation):
    """The board, flat."""

    info_state: list[float] = Field(default_factory=list)
    legal_actions: list[int] = Field(default_factory=list)
