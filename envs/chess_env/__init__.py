"""Chess: play against an engine, or find a mate in one move."""

from __future__ import annotations

from chess_env.client import ChessEnv
from chess_env.models import ChessAction, ChessObservation, ChessState

__all__ = ["ChessAction", "ChessEnv", "ChessObservation", "ChessState"]
