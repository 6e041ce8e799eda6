"""The typed client of the Chess environment."""

from __future__ import annotations

from chess_env.models import ChessAction, ChessObservation, ChessState
from openenv import EnvClient


class ChessEnv(EnvClient[ChessAction, ChessObservation, ChessState]):
    """Plays chess on a server."""
