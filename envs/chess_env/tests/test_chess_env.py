"""The Chess environment: rules, opponents and puzzles, and the package as a whole."""

from __future__ import annotations

import random
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import chess
import pytest

from chess_env import ChessAction, ChessEnv, ChessObservation, ChessState
from chess_env.server.app import app
from chess_env.server.chess_environment import ChessEnvironment
from chess_env.server.opponents import SearchOpponent, find_engine
from openenv import LocalEnv
from openenv.errors import ExecutionError
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served

pytest_plugins = ["openenv.testing.plugin"]

BACK_RANK = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"

ENGINE = """#!{python}
import sys
for line in sys.stdin:
    words = line.split()
    if words[0] == "uci":
        print("id name Tiny\\nuciok", flush=True)
    elif words[0] == "isready":
        print("readyok", flush=True)
    elif words[0] == "position":
        moves = words[words.index("moves") + 1:] if "moves" in words else []
    elif words[0] == "go":
        if len(moves) > 2:
            sys.exit(3)
        print("bestmove " + ("e7e5" if len(moves) == 1 else "d2d4"), flush=True)
    elif words[0] == "quit":
        sys.exit(0)
"""
"""Speaks the UCI protocol, answers twice, and then ends."""


@pytest.fixture
def env() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process."""
    with LocalEnv(ChessEnvironment).sync() as local:
        yield local


def play(env: SyncLocalEnv[Any, Any, Any], *moves: str) -> Any:
    return [env.step(ChessAction(move=move)) for move in moves][-1]


@pytest.mark.parametrize("first", ["e2e4", "e4", " e2e4 "])
def test_a_move_in_either_notation_is_made_and_answered(env: SyncLocalEnv[Any, Any, Any], first: str) -> None:
    begun = env.reset(seed=1, opponent="random").observation
    assert (begun.fen, len(begun.legal_moves), begun.opponent_move) == (chess.STARTING_FEN, 20, None)
    result = play(env, first)
    seen = result.observation
    assert (result.reward, result.done, seen.error) == (0.0, False, None)
    assert env.state().moves == ["e2e4", seen.opponent_move]
    board = chess.Board()
    board.push_uci("e2e4")
    board.push_uci(seen.opponent_move)
    assert (seen.fen, env.state().fen) == (board.fen(), board.fen())
    assert seen.legal_moves == [move.uci() for move in board.legal_moves]


@pytest.mark.parametrize("move", ["e2e5", "Qh5", "castle", "", "0000", "e7e5"])
def test_a_move_that_is_not_legal_costs_a_little_and_changes_nothing(
    env: SyncLocalEnv[Any, Any, Any], move: str
) -> None:
    env.reset(seed=1, opponent="random")
    result = play(env, move)
    assert result.reward == -0.1
    assert "not a legal move" in result.observation.error
    assert result.observation.fen == chess.STARTING_FEN
    assert (env.state().moves, env.state().illegal_moves, env.state().step_count) == ([], 1, 1)
    assert play(env, "e4").observation.error is None


def test_mate_wins_and_being_mated_loses(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(fen=BACK_RANK, opponent="search")
    won = play(env, "Ra8")
    assert (won.reward, won.done, won.observation.result, won.observation.terminated) == (1.0, True, "1-0", True)
    assert (won.observation.legal_moves, env.state().result) == ([], "1-0")
    with pytest.raises(ExecutionError, match="call reset first"):
        play(env, "Kf1")
    env.reset(fen="r5k1/5ppp/8/8/8/1N6/5PPP/6K1 w - - 0 1", opponent="search")
    lost = play(env, "Nd4")  # the knight guarded a1
    assert (lost.observation.opponent_move, lost.reward, lost.observation.result) == ("a8a1", -1.0, "0-1")


def test_the_search_finds_a_mate_and_a_free_piece() -> None:
    chance = random.Random(1)
    assert SearchOpponent(1).choose(chess.Board(BACK_RANK), chance).uci() == "a1a8"
    hanging = chess.Board("k7/8/8/3q4/4P3/8/8/K7 w - - 0 1")
    assert SearchOpponent(1).choose(hanging, chance).uci() == "e4d5"
    guarded = chess.Board("k7/8/2p5/3p4/4Q3/8/8/K7 w - - 0 1")  # d5 is guarded by c6
    assert SearchOpponent(8).choose(guarded, chance).uci() != "e4d5"


def test_stalemate_and_draws_that_may_be_claimed_end_the_game(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(fen="7k/5Q2/8/8/8/8/8/K7 w - - 98 90", opponent="random")
    result = play(env, "Ka2")
    assert (result.observation.result, result.reward, result.done) == ("1/2-1/2", 0.0, True)


def test_the_player_of_black_sees_the_first_move(env: SyncLocalEnv[Any, Any, Any]) -> None:
    begun = env.reset(seed=1, color="black", opponent="random").observation
    assert (begun.color, len(env.state().moves)) == ("black", 1)
    assert begun.opponent_move == env.state().moves[0]
    colors = {env.reset(seed=seed, color="random", opponent="random").observation.color for seed in range(8)}
    assert colors == {"white", "black"}


def test_a_seed_makes_the_same_game_again(env: SyncLocalEnv[Any, Any, Any]) -> None:
    games = []
    for seed in (5, 5, 6):
        env.reset(seed=seed, opponent="random")
        play(env, "e4", "a3", "b3")
        games.append(env.state().moves)
    assert games[0] == games[1] != games[2]


def test_a_game_is_cut_off_after_its_moves(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(seed=1, opponent="random", max_moves=2)
    assert not play(env, "e4").done
    last = play(env, "nonsense")
    assert (last.done, last.observation.truncated, last.observation.terminated) == (True, True, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fen": "nonsense"}, "no position"),
        ({"fen": "8/8/8/8/8/8/8/8 w - - 0 1"}, "impossible"),
        ({"fen": "R5k1/5ppp/8/8/8/8/8/6K1 b - - 0 1"}, "the game is over"),
        ({"color": "green"}, "white, black or random"),
        ({"opponent": "anna"}, "no opponent"),
        ({"level": 0}, "between 1 and 20"),
        ({"max_moves": 0}, "1 or more"),
        ({"split": "none"}, "train, test"),
        ({"split": "test", "index": 20}, "0 to 19"),
    ],
)
def test_a_reset_that_is_not_possible_says_why_and_keeps_the_game(
    env: SyncLocalEnv[Any, Any, Any], arguments: dict[str, Any], message: str
) -> None:
    env.reset(seed=1, opponent="random")
    with pytest.raises(ExecutionError, match=message):
        env.reset(**{"opponent": "random", **arguments})
    assert play(env, "e4").observation.error is None


def test_an_engine_plays_by_uci_and_its_end_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "tiny"
    program.write_text(ENGINE.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with LocalEnv(lambda: ChessEnvironment(str(program)), ChessAction).sync() as env:
        env.reset(opponent="engine")
        assert env.state().opponent == "tiny at depth 3"
        assert play(env, "e4").observation.opponent_move == "e7e5"
        with pytest.raises(ExecutionError, match="does not answer"):
            play(env, "d4")
        with pytest.raises(ExecutionError, match="call reset first"):
            play(env, "d4")
        env.reset()
        assert play(env, "e4").observation.opponent_move == "e7e5"
    with pytest.raises(RuntimeError, match="does not start"):
        ChessEnvironment(str(tmp_path / "none")).reset(opponent="engine")


@pytest.mark.skipif(find_engine(None) is None, reason="needs Stockfish: apt-get install stockfish")
def test_stockfish_plays_the_same_game_again(env: SyncLocalEnv[Any, Any, Any]) -> None:
    games = []
    for _ in range(2):
        env.reset(seed=1, opponent="engine", level=2)
        play(env, "e4", "a3", "h3")
        games.append(env.state().moves)
    assert games[0] == games[1]
    assert "stockfish" in env.state().opponent


def test_a_copy_of_a_game_goes_on_by_itself(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(seed=1, opponent="random")
    play(env, "e4")
    (copy,) = env.fork()
    ours, theirs = play(env, "a3"), play(copy, "a3")
    assert ours.observation == theirs.observation
    play(copy, "b3")
    assert (len(env.state().moves), len(copy.state().moves)) == (4, 6)
    copy.close()


def test_each_puzzle_has_one_move_that_mates(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = ChessEnvironment()
    tasks = world.list_tasks("train") + world.list_tasks("test")
    assert len({task["fen"] for task in tasks}) == len(tasks) == 120
    for task in tasks:
        board = chess.Board(task["fen"])
        assert sum(mates(board, move) for move in list(board.legal_moves)) == 1
    task = world.get_task("test", 3)
    board = chess.Board(task["fen"])
    best = next(move for move in list(board.legal_moves) if mates(board, move))
    other = next(move for move in list(board.legal_moves) if not mates(board, move))
    for move, reward in ((best, 1.0), (other, 0.0)):
        assert env.reset(split="test", index=3, opponent="random").observation.fen == task["fen"]
        result = play(env, move.uci())
        assert (result.reward, result.done) == (reward, True)


def mates(board: chess.Board, move: chess.Move) -> bool:
    board.push(move)
    is_mate = board.is_checkmate()
    board.pop()
    return is_mate


def test_the_page_shows_the_board_and_the_legal_moves() -> None:
    world = ChessEnvironment()
    begun = world.reset(seed=1, opponent="random").model_dump(mode="json")
    picture = world.render_web({**begun, "error": "<b>"}) or ""
    drawing, _, note = picture.partition("</svg>")
    assert len(ElementTree.fromstring(f"{drawing}</svg>").findall("{*}use")) == 32
    assert "&lt;b&gt;" in note
    buttons = world.web_actions(begun)
    assert len(buttons) == 20
    assert ("Nf3", {"move": "g1f3"}) in buttons
    assert (world.render_web({}), world.web_actions({})) == (None, [])


def test_the_typed_client_plays_on_a_server(serve_env: Callable[..., Served]) -> None:
    with ChessEnv(base_url=serve_env(app).url).sync() as env:
        result = env.reset(fen=BACK_RANK, opponent="random")
        assert isinstance(result.observation, ChessObservation)
        assert env.step(ChessAction(move="Ra8#")).reward == 1.0
        state = env.state()
        assert isinstance(state, ChessState)
        assert (state.result, state.moves) == ("1-0", ["a1a8"])


@pytest.mark.slow
def test_the_installed_package_is_served_and_played(try_package: Callable[..., list[float]]) -> None:
    def choose(observation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        return {"move": chance.choice(observation["legal_moves"])}

    returns = try_package("chess_env", choose, most_steps=30, opponent="search", level=1)
    assert len(returns) == 100
    assert min(returns) == -1.0
