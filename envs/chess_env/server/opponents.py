"""Opponents: a UCI engine, a small search of our own, and chance. Knows boards; must not know episodes or rewards."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Protocol

import chess
import chess.engine

LEVELS = range(1, 21)
_PLACES = ("/usr/games/stockfish",)  # Debian's games are not on the path of every user
_MOVE_S = 10.0
_SEARCH_DEPTHS = (1, 2, 3)
_VALUES = {
    chess.PAWN: 100,
    chess.KNIGHT: 320,
    chess.BISHOP: 330,
    chess.ROOK: 500,
    chess.QUEEN: 900,
    chess.KING: 0,
}
_MATE = 100_000


class Opponent(Protocol):
    """The player of the other side."""

    name: str

    def choose(self, board: chess.Board, chance: random.Random) -> chess.Move:
        """Choose a legal move."""

    def close(self) -> None:
        """Free what the opponent took."""


class RandomMover:
    """Plays any legal move."""

    name = "random"

    def choose(self, board: chess.Board, chance: random.Random) -> chess.Move:
        """Draw a move."""
        return chance.choice(list(board.legal_moves))

    def close(self) -> None:
        """Do nothing."""


class SearchOpponent:
    """Looks a few moves ahead: negamax with alpha-beta pruning over material and the squares that pieces reach.

    Args:
        level: 1 to 20, of which each third is one more half-move, up to three.
    """

    def __init__(self, level: int) -> None:
        self._depth = _SEARCH_DEPTHS[min(len(_SEARCH_DEPTHS) - 1, (level - 1) // 7)]
        self.name = f"search to depth {self._depth}"

    def choose(self, board: chess.Board, chance: random.Random) -> chess.Move:
        """Return the best move; among equals, chance decides."""
        moves = list(board.legal_moves)
        chance.shuffle(moves)
        best, best_value = moves[0], -_MATE * 2
        for move in sorted(moves, key=board.is_capture, reverse=True):
            board.push(move)
            value = -_negamax(board, self._depth - 1, -_MATE * 2, -best_value)
            board.pop()
            if value > best_value:
                best, best_value = move, value
        return best

    def close(self) -> None:
        """Do nothing."""


def _negamax(board: chess.Board, depth: int, low: int, high: int) -> int:
    """Return the value of a position for the side to move, if it lies between the bounds."""
    moves = list(board.legal_moves)
    if not moves:
        return -_MATE - depth if board.is_check() else 0
    if board.is_insufficient_material() or board.halfmove_clock >= 100:
        return 0
    if depth <= 0:
        return _material(board) + len(moves)
    for move in sorted(moves, key=board.is_capture, reverse=True):
        board.push(move)
        low = max(low, -_negamax(board, depth - 1, -high, -low))
        board.pop()
        if low >= high:
            break
    return low


def _material(board: chess.Board) -> int:
    """Count what the side to move has, less what the other one has."""
    return sum(
        value * (board.pieces_mask(kind, board.turn).bit_count() - board.pieces_mask(kind, not board.turn).bit_count())
        for kind, value in _VALUES.items()
    )


class EngineOpponent:
    """A UCI engine in a process of its own; it looks to a fixed depth, so that it plays the same again.

    Args:
        program: The engine's path.
        level: The depth in half-moves, 1 to 20.

    Raises:
        RuntimeError: It does not start.
    """

    def __init__(self, program: str, level: int) -> None:
        self.name = f"{Path(program).name} at depth {level}"
        self._depth = level
        try:
            self._engine = chess.engine.SimpleEngine.popen_uci(program, timeout=_MOVE_S)
        except (OSError, chess.engine.EngineError, TimeoutError) as error:
            raise RuntimeError(f"the engine {program} does not start: {error}") from error
        if "Threads" in self._engine.options:
            self._engine.configure({"Threads": 1})

    def choose(self, board: chess.Board, chance: random.Random) -> chess.Move:
        """Ask the engine.

        Raises:
            RuntimeError: It ended, or does not answer.
        """
        limit = chess.engine.Limit(depth=self._depth, time=_MOVE_S)
        try:
            # A new game with each move empties the engine's memory, so that a position alone decides the reply.
            move = self._engine.play(board, limit, game=object()).move
        except (chess.engine.EngineError, TimeoutError) as error:
            raise RuntimeError(f"{self.name} does not answer: {error}; reset to start it again") from error
        if move is None:
            raise RuntimeError(f"{self.name} resigned or has no move in {board.fen()}")
        return move

    def close(self) -> None:
        """End the engine's process."""
        with contextlib.suppress(chess.engine.EngineError, TimeoutError):
            self._engine.quit()
        self._engine.close()


def find_engine(program: str | None) -> str | None:
    """Return the path of a UCI engine: the one that is named, or Stockfish where it is installed."""
    if program is not None:
        return program
    return shutil.which("stockfish") or next((place for place in _PLACES if Path(place).is_file()), None)


def make_opponent(name: str, level: int, engine: str | None) -> Opponent:
    """Return an opponent.

    Args:
        name: `engine`, `search`, `random`, or `auto`: an engine where there is one, else the search.
        level: How far it looks, 1 to 20.
        engine: The path of a UCI engine; without one, Stockfish is looked for.

    Raises:
        ValueError: There is no such opponent or level.
        RuntimeError: There is no engine, or it does not start.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be between {LEVELS[0]} and {LEVELS[-1]}, not {level}")
    program = find_engine(engine)
    if name == "engine" and program is None:
        raise RuntimeError("no UCI engine is installed: apt-get install stockfish, or name one in CHESS_ENGINE")
    match name:
        case "engine" | "auto" if program is not None:
            return EngineOpponent(program, level)
        case "search" | "auto":
            return SearchOpponent(level)
        case "random":
            return RandomMover()
        case _:
            raise ValueError(f"there is no opponent {name!r}: choose auto, engine, search or random")
