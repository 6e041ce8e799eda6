"""The TextArena environment: games, other players and tasks, and the package as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("textarena", reason="needs textarena: make test-envs")

from openenv import LocalEnv
from openenv.errors import ExecutionError
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served
from textarena_env import TextArenaAction, TextArenaEnv, TextArenaObservation, TextArenaState, client
from textarena_env.server.app import app
from textarena_env.server.textarena_environment import TextArenaEnvironment

pytest_plugins = ["openenv.testing.plugin"]

GAMES = (
    "2048-v0",
    "Blackjack-v0",
    "Mastermind-v0",
    "Minesweeper-v0",
    "TowerOfHanoi-v0",
    "ConnectFour-v0",
    "KuhnPoker-v0",
    "Othello-v0",
    "IteratedPrisonersDilemma-v0",
    "TicTacToe-v0",
    "LiarsDice-v0",
)
"""Games that need nothing but the package, of all kinds."""


@pytest.fixture
def env() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process."""
    with LocalEnv(TextArenaEnvironment).sync() as local:
        yield local


def say(env: SyncLocalEnv[Any, Any, Any], message: str) -> Any:
    return env.step(TextArenaAction(message=message))


def test_a_game_for_one_is_played_to_its_end(env: SyncLocalEnv[Any, Any, Any]) -> None:
    begun = env.reset(seed=3).observation
    assert "Guess The Number" in begun.prompt
    assert (begun.messages[0].sender_id, begun.messages[0].category) == (-1, "PROMPT")
    assert (begun.legal_players, begun.current_player_id) == ([0], 0)
    number = env.state().raw_state["game_number"]
    wrong = say(env, f"Perhaps [{number - 1}]?")
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert "higher" in wrong.observation.messages[-1].content
    assert wrong.observation.prompt == begun.prompt
    right = say(env, f"[{number}]")
    assert (right.reward, right.done, right.observation.terminated) == (1.0, True, True)
    state = env.state()
    assert (state.env_id, state.num_players, state.turn, state.last_reward) == ("GuessTheNumber-v0", 1, 2, 1.0)
    with pytest.raises(ExecutionError, match="call reset first"):
        say(env, "[1]")


@pytest.mark.parametrize("game", GAMES)
def test_a_seed_makes_the_same_game_again_whatever_else_is_played(game: str) -> None:
    def play(beside: bool) -> list[Any]:
        with LocalEnv(TextArenaEnvironment).sync() as env, LocalEnv(TextArenaEnvironment).sync() as other:
            seen, chance = [env.reset(env_id=game, seed=5, max_steps=12)], random.Random(1)
            while not seen[-1].done:
                if beside:
                    random.seed()  # as other code of the process may do
                    other.reset(env_id=game, seed=9)
                moves = TextArenaEnvironment().web_actions(seen[-1].observation.model_dump(mode="json"))
                seen.append(say(env, chance.choice(moves)[0] if moves else "[0]"))
            return [(result.observation, result.reward) for result in seen]

    first, again = play(beside=False), play(beside=True)
    assert first == again
    assert -1.0 <= first[-1][1] <= 1.0


def test_random_opponents_answer_until_it_is_the_players_turn(env: SyncLocalEnv[Any, Any, Any]) -> None:
    begun = env.reset(env_id="TicTacToe-v0", seed=1).observation
    assert begun.current_player_id == 0
    seen = say(env, "[4]").observation
    assert {message.sender_id for message in seen.messages} == {-1, 0, 1}
    assert seen.current_player_id == 0
    second = env.reset(env_id="TicTacToe-v0", seed=1, player_id=1).observation
    assert (second.legal_players, second.current_player_id) == ([1], 1)
    assert "You are Player 1" in second.prompt


def test_one_client_may_play_all_sides(env: SyncLocalEnv[Any, Any, Any]) -> None:
    begun = env.reset(env_id="TicTacToe-v0", seed=1, opponent="self").observation
    assert begun.legal_players == [0, 1]
    players, result = [], None
    for move in ("[0]", "[3]", "[1]", "[4]", "[2]"):
        players.append((begun if result is None else result.observation).current_player_id)
        result = say(env, move)
    assert players == [0, 1, 0, 1, 0]
    assert result is not None
    assert (result.reward, result.done) == (1.0, True)
    assert result.observation.info["rewards"] == {"0": 1.0, "1": -1.0}


def test_the_server_may_bring_an_opponent_of_its_own() -> None:
    heard: list[str] = []

    def opponent(text: str) -> str:
        heard.append(text)
        return "[8]"

    with LocalEnv(lambda: TextArenaEnvironment("TicTacToe-v0", opponent=opponent), TextArenaAction).sync() as env:
        env.reset(seed=1)
        say(env, "[4]")
        assert "You are Player 1" in heard[0]
        assert "Available Moves" in heard[0]
        lost = say(env, "[0]")  # [8] is taken, and a second mistake loses the game
        assert (lost.reward, lost.done) == (1.0, True)
        env.reset(seed=1, opponent="random")
        said = len(heard)
        say(env, "[4]")
        assert len(heard) == said


def test_a_game_is_cut_off_after_its_steps(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(env_id="PigDice-v0", seed=1, opponent="self", max_steps=3)
    assert [say(env, "[roll]").done for _ in range(3)] == [False, False, True]
    assert env.state().step_count == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "GuessTheNumbers-v0"}, "did you mean GuessTheNumber-v0"),
        ({"env_id": "Wordle-v0"}, "nltk.downloader"),
        ({"env_id": "Debate-v0"}, "OPENROUTER_API_KEY"),
        ({"env_kwargs": {"colour": "red"}}, "colour"),
        ({"env_id": "TicTacToe-v0", "num_players": 5}, "TicTacToe-v0 cannot be made"),
        ({"env_id": "TicTacToe-v0", "player_id": 2}, "between 0 and 1"),
        ({"opponent": "anna"}, "random or self"),
        ({"opponent": "server"}, "where the server has one"),
        ({"max_steps": 0}, "1 or more"),
        ({"split": "none"}, "train, test"),
        ({"split": "test", "index": 100}, "0 to 99"),
    ],
)
def test_a_reset_that_is_not_possible_says_why_and_keeps_the_game(
    env: SyncLocalEnv[Any, Any, Any], arguments: dict[str, Any], message: str
) -> None:
    env.reset(seed=3)
    with pytest.raises(ExecutionError, match=message):
        env.reset(**arguments)
    assert say(env, "[1]").observation.messages


def test_the_page_shows_a_chat_and_the_moves_in_it(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = TextArenaEnvironment()
    seen = {"messages": [{"sender_id": -1, "content": "<b> [1] or [2], not [1]"}, {"sender_id": 0, "content": "hm"}]}
    picture = world.render_web(seen) or ""
    assert "&lt;b&gt;" in picture
    assert "Player 0" in picture
    assert world.web_actions(seen) == [("[1]", {"message": "[1]"}), ("[2]", {"message": "[2]"})]
    assert (world.render_web({}), world.web_actions({})) == (None, [])


def test_tasks_are_seeds_that_the_splits_do_not_share(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = TextArenaEnvironment()
    train, test = world.list_tasks("train"), world.list_tasks("test")
    assert (len(train), len(test)) == (world.num_tasks("train"), world.num_tasks("test")) == (1000, 100)
    assert {task["seed"] for task in train}.isdisjoint(task["seed"] for task in test)
    env.reset(split="test", index=7)
    number = env.state().raw_state
    env.reset(seed=test[7]["seed"])
    assert env.state().raw_state == number


def test_the_typed_client_plays_on_a_server(serve_env: Callable[..., Served]) -> None:
    with TextArenaEnv(base_url=serve_env(app).url).sync() as env:
        result = env.reset(env_id="TicTacToe-v0", seed=3)
        assert isinstance(result.observation, TextArenaObservation)
        assert env.step(TextArenaAction(message="[4]")).observation.messages[0].content == "[4]"
        assert isinstance(env.state(), TextArenaState)


def test_the_client_has_the_name_that_auto_env_looks_for() -> None:
    assert client.TextarenaEnv is TextArenaEnv


@pytest.mark.slow
def test_the_installed_package_is_served_and_played(try_package: Callable[..., list[float]]) -> None:
    def choose(observation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        return {"message": f"[{chance.randint(1, 20)}]"}

    returns = try_package("textarena_env", choose)
    assert len(returns) == 100
    assert max(returns) == 1.0
