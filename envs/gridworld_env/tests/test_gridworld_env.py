"""The Gridworld: its rules in this process, and an episode on a server that was started from its folder."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

from gridworld_env import GridworldAction, GridworldEnv, GridworldObservation
from gridworld_env.models import OFFSETS, Cell, Move
from gridworld_env.server.app import app
from gridworld_env.server.gridworld_environment import GridworldEnvironment
from gridworld_env.server.world import World, make_world
from openenv import LocalEnv
from openenv.errors import ExecutionError, RequestValidationError
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served

pytest_plugins = ["openenv.testing.plugin"]

MOVES: tuple[Move, ...] = ("up", "down", "left", "right")


@pytest.fixture
def env() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process."""
    with LocalEnv(GridworldEnvironment).sync() as local:
        yield local


def walk(world: World, avoid: str = "#o") -> list[Move]:
    """Find the moves of a shortest way from start to goal."""
    return way(world, world.goal, avoid)


def way(world: World, target: Cell, avoid: str = "#o") -> list[Move]:
    """Find the moves of a shortest way from the start to a cell."""
    paths: dict[Cell, list[Move]] = {world.start: []}
    queue = [world.start]
    while queue:
        cell = queue.pop(0)
        for move in MOVES:
            neighbour = (cell[0] + OFFSETS[move][0], cell[1] + OFFSETS[move][1])
            if neighbour not in paths and (neighbour == target or world.tile(neighbour) not in avoid):
                paths[neighbour] = [*paths[cell], move]
                queue.append(neighbour)
    return paths[target]


def play(env: SyncLocalEnv[Any, Any, Any], moves: list[Move]) -> list[Any]:
    """Take the moves."""
    return [env.step(GridworldAction(move=move)) for move in moves]


@pytest.mark.parametrize("size", [4, 8, 13, 32])
def test_every_map_has_a_safe_way_of_the_length_it_states(size: int) -> None:
    for seed in range(20):
        world = make_world(seed, size)
        assert len(walk(world)) == world.shortest_path >= size // 2
        assert world.tile(world.start) == "."
        assert sum(row.count("G") for row in world.tiles) == 1


def test_a_seed_makes_the_same_episode_again(env: SyncLocalEnv[Any, Any, Any]) -> None:
    first = [env.reset(seed=2).observation, *(r.observation for r in play(env, ["up", "down", "up"]))]
    again = [env.reset(seed=2).observation, *(r.observation for r in play(env, ["up", "down", "up"]))]
    other = env.reset(seed=6).observation
    assert first == again
    assert other.board != first[0].board


def test_without_a_seed_one_is_drawn_and_shown_in_the_state(env: SyncLocalEnv[Any, Any, Any]) -> None:
    board = env.reset().observation.board
    seed = env.state().seed
    assert env.reset(seed=seed).observation.board == board


def test_the_shortest_way_ends_at_the_goal_with_its_reward(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(seed=2)
    moves = walk(make_world(2, 8))
    results = play(env, moves)
    last = results[-1]
    assert [r.done for r in results] == [False] * (len(moves) - 1) + [True]
    assert (last.observation.event, last.observation.terminated, last.observation.truncated) == ("goal", True, False)
    assert last.reward == pytest.approx(0.89)
    state = env.state()
    assert state.position == state.goal
    assert state.step_count == state.shortest_path == len(moves)
    assert state.total_reward == pytest.approx(0.9 - 0.01 * len(moves))
    assert state.scores == {"outcome": 1.0, "effort": -0.1}


def test_a_pit_ends_the_episode_with_a_penalty(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = make_world(2, 8)
    pit = next((r, c) for r, row in enumerate(world.tiles) for c, tile in enumerate(row) if tile == "o")
    env.reset(seed=2)
    last = play(env, way(world, pit))[-1]
    assert (last.observation.event, last.observation.terminated) == ("pit", True)
    assert last.reward == pytest.approx(-0.91)


def test_a_wall_is_not_entered_and_costs_more_than_a_move(env: SyncLocalEnv[Any, Any, Any]) -> None:
    start = env.reset(seed=1).observation.position
    result = env.step(GridworldAction(move="right"))  # seed 1 starts left of a wall
    assert (result.observation.event, result.observation.position) == ("bumped", start)
    assert result.reward == pytest.approx(-0.05)
    assert not result.done


def test_an_episode_that_gets_nowhere_is_truncated(env: SyncLocalEnv[Any, Any, Any]) -> None:
    limit = env.reset(seed=1).observation.steps_left
    results = play(env, ["right"] * limit)
    last = results[-1].observation
    assert [r.done for r in results].index(True) == limit - 1
    assert (last.event, last.terminated, last.truncated, last.steps_left) == ("timeout", False, True, 0)


@pytest.mark.parametrize("played", [False, True])
def test_a_step_outside_an_episode_is_an_error(env: SyncLocalEnv[Any, Any, Any], played: bool) -> None:
    if played:
        env.reset(seed=2)
        play(env, walk(make_world(2, 8)))
    with pytest.raises(ExecutionError, match="call reset first"):
        env.step(GridworldAction(move="up"))


@pytest.mark.parametrize(
    "arguments", [{"size": 3}, {"size": 33}, {"split": "nowhere"}, {"split": "test", "index": 100}]
)
def test_a_reset_that_is_not_possible_leaves_the_episode_as_it_was(
    env: SyncLocalEnv[Any, Any, Any], arguments: dict[str, Any]
) -> None:
    env.reset(seed=2)
    before = env.state().model_copy()
    with pytest.raises(ExecutionError):
        env.reset(**arguments)
    assert env.state() == before
    play(env, walk(make_world(2, 8)))


def test_a_move_that_does_not_exist_is_refused(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(seed=2)
    with pytest.raises(RequestValidationError):
        env.step({"move": "sideways"})


def test_the_board_shows_what_the_tiles_say(env: SyncLocalEnv[Any, Any, Any]) -> None:
    observation = env.reset(seed=2, size=5).observation
    lines = observation.board.splitlines()
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines) == 5 + 2
    row, column = observation.position
    assert lines[row + 1][2 + 2 * column] == "●"
    assert observation.board.count("◆") == 1
    assert observation.board.count("○") == sum(line.count("o") for line in observation.tiles)


def test_the_web_page_gets_a_picture_and_four_moves_until_the_end(env: SyncLocalEnv[Any, Any, Any]) -> None:
    observation = env.reset(seed=2).observation.model_dump(mode="json")
    world = GridworldEnvironment()
    picture = ElementTree.fromstring(world.render_web(observation) or "")
    assert len(picture.findall("{*}rect")) == 64
    assert [action for _, action in world.web_actions(observation)] == [{"move": move} for move in MOVES]
    assert world.web_actions({**observation, "event": "goal"}) == []
    assert world.render_web({}) is None


def test_tasks_are_maps_that_the_splits_do_not_share(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = GridworldEnvironment()
    assert world.list_splits() == ["train", "test"]
    train, test = world.list_tasks("train"), world.list_tasks("test")
    assert (len(train), len(test)) == (world.num_tasks("train"), world.num_tasks("test")) == (1000, 100)
    assert {task["seed"] for task in train}.isdisjoint(task["seed"] for task in test)
    assert world.get_task_range("test", 3, 5) == [world.get_task("test", 3), world.get_task("test", 4)] == test[3:5]
    with pytest.raises(IndexError):
        world.get_task("test", -1)
    board = env.reset(split="test", index=3).observation.board
    assert env.reset(seed=test[3]["seed"]).observation.board == board


def test_the_typed_client_plays_on_a_server_started_from_the_folder(serve_folder: Callable[[str], str]) -> None:
    url = serve_folder("gridworld_env")
    with GridworldEnv(base_url=url).sync() as env, LocalEnv(GridworldEnvironment).sync() as local:
        result = env.reset(seed=2, episode_id="served")
        assert result.observation == local.reset(seed=2).observation
        for move in walk(make_world(2, 8)):
            result = env.step(GridworldAction(move=move))
            assert result.observation == local.step(GridworldAction(move=move)).observation
        assert isinstance(result.observation, GridworldObservation)
        assert result.done
        assert result.observation.terminated
        state = env.state()
        assert (state.episode_id, state.position) == ("served", state.goal)
        with pytest.raises(ExecutionError, match="call reset first"):
            env.step(GridworldAction(move="up"))
        assert not env.reset(split="test", index=0).done


def test_the_task_api_offers_the_catalogue(serve_env: Callable[..., Served]) -> None:
    url = serve_env(app).url

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    assert ask("/list_environments") == ["gridworld_env"]
    assert ask("/gridworld_env/splits") == [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}]
    assert ask("/gridworld_env/num_tasks", {"split": "test"}) == {"num_tasks": 100}
    task = ask("/gridworld_env/task", {"split": "test", "index": 7})["task"]
    assert task == {"split": "test", "index": 7, "seed": 1_000_007}
    assert set(ask("/schema")["state"]["properties"]) >= {"seed", "goal", "episode_id"}
