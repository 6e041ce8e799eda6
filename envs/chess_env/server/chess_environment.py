"""The Chess environment: games against an opponent, and puzzles. Opponents are elsewhere."""

from __future__ import annotations

import html
import random
import secrets
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import chess
import chess.svg
from typing_extensions import TypedDict

from chess_env.models import ChessAction, ChessObservation, ChessState, Color
from chess_env.server.opponents import Opponent, make_opponent
from openenv import Environment
from openenv.core.env_server.types import EnvironmentMetadata
from openenv.env.tasks import TaskCatalogue

ILLEGAL_REWARD = -0.1
MAX_MOVES = 150
SPLITS = ("train", "test")
_COLORS: dict[chess.Color, Color] = {chess.WHITE: "white", chess.BLACK: "black"}


class Task(TypedDict):
    """A position in which one move mates; `reset(split=..., index=...)` begins it."""

    split: str
    index: int
    fen: str
    goal: str


class ChessEnvironment(TaskCatalogue[Task], Environment[ChessAction, ChessObservation, ChessState]):
    """Play chess against an engine, or find the mate in one move.

    Args:
        engine: The path of a UCI engine; by default Stockfish where it is installed.
    """

    SPLITS = SPLITS

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, engine: str | None = None) -> None:
        super().__init__()
        self._engine = engine
        self._board = chess.Board()
        self._side: chess.Color = chess.WHITE
        self._chance = random.Random(0)
        self._most_moves = 0
        self._is_over = True
        self._opponent: Opponent | None = None
        self._wanted: tuple[str, int] = ("auto", 1)
        self._state = ChessState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        fen: str | None = None,
        color: str = "white",
        opponent: str = "auto",
        level: int = 3,
        max_moves: int = MAX_MOVES,
        split: str | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> ChessObservation:
        """Begin a game, or a puzzle (`split` and `index`).

        Args:
            seed: Of what the opponent leaves to chance; drawn if there is none.
            episode_id: A name for the episode.
            fen: The first position; by default that of the game. The side to move is then yours.
            color: `white`, `black` or `random`, if the game begins as usual.
            opponent: `engine` (UCI), `search`, `random`, or `auto`: an engine where there is one, else the search.
            level: How far the opponent looks, 1 to 20 half-moves; the search has three depths.
            max_moves: After how many moves of yours the game is cut off.
            split: The puzzles: train or test.
            index: Which puzzle of the split.

        Raises:
            ValueError: An argument is not possible.
            IndexError: The split has no such puzzle.
            RuntimeError: The engine does not start.
        """
        if split is not None:
            fen, max_moves = _task(split, index)["fen"], 1
        if max_moves < 1:
            raise ValueError(f"max_moves must be 1 or more, not {max_moves}")
        chance = random.Random(secrets.randbelow(2**31) if seed is None else seed)
        board, side = _position(fen, color, chance)
        name = self._take_opponent(opponent, level).name
        self._board, self._side, self._chance, self._most_moves = board, side, chance, max_moves
        self._is_over = False
        self._state = ChessState(
            episode_id=episode_id or str(uuid.uuid4()),
            fen=board.fen(),
            color=_COLORS[side],
            opponent=name,
        )
        reply = self._reply() if board.turn != side else None
        return self._observe(reply)

    def step(self, action: ChessAction, timeout_s: float | None = None, **kwargs: Any) -> ChessObservation:
        """Make a move; the opponent replies. A move that is not legal costs a little and changes nothing.

        Raises:
            RuntimeError: No game is running, or the engine does not answer.
        """
        if self._is_over:
            raise RuntimeError("no episode is running: call reset first")
        self._state.step_count += 1
        move = _parse(self._board, action.move)
        if move is None:
            self._state.illegal_moves += 1
            observation = self._observe(None, error=f"{action.move} is not a legal move in this position")
            observation.reward = ILLEGAL_REWARD
            return self._end(observation)
        self._push(move)
        reply = None if self._result() else self._reply()
        observation = self._observe(reply)
        observation.reward = self._reward()
        return self._end(observation)

    def _take_opponent(self, name: str, level: int) -> Opponent:
        """Have the wanted opponent; an engine is kept for the next game, unless it failed."""
        if self._opponent is None or self._wanted != (name, level):
            opponent = make_opponent(name, level, self._engine)
            self.close()
            self._opponent, self._wanted = opponent, (name, level)
        return self._opponent

    def _reply(self) -> chess.Move:
        assert self._opponent is not None
        try:
            move = self._opponent.choose(self._board, self._chance)
        except RuntimeError:
            self._is_over = True
            self.close()  # the next reset starts another one
            raise
        self._push(move)
        return move

    def _push(self, move: chess.Move) -> None:
        self._board.push(move)
        self._state.moves.append(move.uci())
        self._state.fen = self._board.fen()

    def _result(self) -> str | None:
        """Return the result of a finished game; a draw that may be claimed is one."""
        outcome = self._board.outcome(claim_draw=True)
        return None if outcome is None else outcome.result()

    def _reward(self) -> float:
        outcome = self._board.outcome(claim_draw=True)
        if outcome is None or outcome.winner is None:
            return 0.0
        return 1.0 if outcome.winner == self._side else -1.0

    def _end(self, observation: ChessObservation) -> ChessObservation:
        steps = self._state.step_count
        observation.terminated = observation.result is not None
        observation.truncated = not observation.terminated and steps >= self._most_moves
        observation.done = self._is_over = observation.terminated or observation.truncated
        self._state.result = observation.result
        return observation

    def _observe(self, reply: chess.Move | None, error: str | None = None) -> ChessObservation:
        board, result = self._board, self._result()
        return ChessObservation(
            fen=board.fen(),
            board=board.unicode(empty_square="·"),
            color=_COLORS[self._side],
            legal_moves=[] if result else [move.uci() for move in board.legal_moves],
            is_check=board.is_check(),
            opponent_move=None if reply is None else reply.uci(),
            result=result,
            error=error,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the game; an engine's process is not part of it."""
        return {
            "board": self._board.copy(),
            "side": self._side,
            "chance": self._chance.getstate(),
            "most_moves": self._most_moves,
            "is_over": self._is_over,
            "wanted": self._wanted,
            "state": self._state.model_copy(deep=True),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue a game, with an opponent of its own."""
        self._take_opponent(*snapshot["wanted"])
        self._chance = random.Random()
        self._chance.setstate(snapshot["chance"])
        self._board, self._side = snapshot["board"].copy(), snapshot["side"]
        self._most_moves, self._is_over = snapshot["most_moves"], snapshot["is_over"]
        self._state = snapshot["state"].model_copy(deep=True)

    @property
    def state(self) -> ChessState:
        """The running game."""
        return self._state

    def close(self) -> None:
        """End the opponent."""
        opponent, self._opponent = self._opponent, None
        if opponent is not None:
            opponent.close()

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="chess_env", description="Play chess against an engine, or find a mate in one.", version="0.11.0"
        )

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Draw the board from the side of the player."""
        if not observation.get("fen"):
            return None
        board = chess.Board(observation["fen"])
        last = observation.get("opponent_move")
        drawing = chess.svg.board(
            board,
            orientation=observation.get("color") != "black",
            lastmove=chess.Move.from_uci(last) if last else None,
            check=board.king(board.turn) if board.is_check() else None,
            size=372,
        )
        note = html.escape(observation.get("error") or observation.get("result") or "")
        return f'{drawing}<p style="margin:4px;font:15px system-ui;color:light-dark(#222,#ddd)">{note}</p>'

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer the legal moves."""
        if not observation.get("fen"):
            return []
        board = chess.Board(observation["fen"])
        moves = [chess.Move.from_uci(move) for move in observation.get("legal_moves", [])]
        return sorted((board.san(move), {"move": move.uci()}) for move in moves)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(_puzzles(split))

    def get_task(self, split: str, index: int) -> Task:
        """Return one task."""
        return _task(split, index)


@cache
def _puzzles(split: str) -> tuple[str, ...]:
    """Read the positions of a split."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    return tuple(Path(__file__).with_name(f"mates_{split}.txt").read_text(encoding="utf-8").splitlines())


def _task(split: str, index: int) -> Task:
    positions = _puzzles(split)
    if not 0 <= index < len(positions):
        raise IndexError(f"{split} has tasks 0 to {len(positions) - 1}, not {index}")
    return Task(split=split, index=index, fen=positions[index], goal="Give mate with one move.")


def _position(fen: str | None, color: str, chance: random.Random) -> tuple[chess.Board, chess.Color]:
    """Return the first position, and the side of the agent."""
    if fen is not None:
        try:
            board = chess.Board(fen)
        except ValueError as error:
            raise ValueError(f"fen is no position: {error}") from None
        if not board.is_valid() or board.is_game_over():
            raise ValueError(f"no game can be played from {fen!r}: the position is impossible, or the game is over")
        return board, board.turn
    sides = {"white": chess.WHITE, "black": chess.BLACK, "random": chance.random() < 0.5}
    if color not in sides:
        raise ValueError(f"color must be white, black or random, not {color!r}")
    return chess.Board(), sides[color]


def _parse(board: chess.Board, text: str) -> chess.Move | None:
    """Read a move in UCI notation or SAN; None for one that is not legal."""
    for read in (board.parse_uci, board.parse_san):
        try:
            move = read(text.strip())
        except ValueError:
            continue
        return move or None  # the null move, 0000, is none
    return None
