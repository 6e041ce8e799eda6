"""The Gymnasium environment: ids, spaces, pictures and tasks, and the package as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import register, registry

from gymnasium_env import GymnasiumAction, GymnasiumEnv, GymnasiumObservation, GymnasiumState
from gymnasium_env.server.app import app
from gymnasium_env.server.gymnasium_environment import GymnasiumEnvironment
from openenv import LocalEnv
from openenv.errors import ExecutionError
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served

pytest_plugins = ["openenv.testing.plugin"]


class Lamp(gymnasium.Env[Any, Any]):
    """A picture that is as bright as the last action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - as Gymnasium writes it
    action_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    observation_space = gymnasium.spaces.Dict({"light": gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)})

    def __init__(self, render_mode: str | None = None, size: int = 4) -> None:
        self.render_mode = render_mode
        self.size = size
        self.light = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.light = np.array([(options or {}).get("light", 0.0)], np.float32)
        return {"light": self.light}, {"size": self.size}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.light = action
        return {"light": self.light}, float(action[0]), bool(action[0] >= 1), False, {}

    def render(self) -> Any:
        return np.full((self.size, self.size, 3), int(255 * self.light[0]), np.uint8)


@pytest.fixture(autouse=True)
def lamp() -> Iterator[None]:
    """Register an environment that draws without any other package."""
    register("Lamp-v0", entry_point=Lamp)
    yield
    del registry["Lamp-v0"]


@pytest.fixture
def env() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process."""
    with LocalEnv(GymnasiumEnvironment).sync() as local:
        yield local


def test_an_episode_is_that_of_gymnasium(env: SyncLocalEnv[Any, Any, Any]) -> None:
    plain = gymnasium.make("CartPole-v1")
    first, _ = plain.reset(seed=3)
    begun = env.reset(seed=3).observation
    assert np.array_equal(begun.observation, first)
    assert begun.action_space == {"type": "Discrete", "n": 2, "start": 0}
    assert begun.observation_space["shape"] == [4]
    done, total = False, 0.0
    while not done:
        values, reward, terminated, truncated, _ = plain.step(1)
        result = env.step(GymnasiumAction(action=1))
        assert np.array_equal(result.observation.observation, values)
        assert (result.reward, result.observation.terminated, result.observation.truncated) == (
            reward,
            terminated,
            truncated,
        )
        total, done = total + float(reward), terminated or truncated
    assert result.done
    state = env.state()
    assert (state.env_id, state.seed, state.total_reward) == ("CartPole-v1", 3, total)
    with pytest.raises(ExecutionError, match="call reset first"):
        env.step({"action": 1})


def test_a_reset_chooses_the_environment_and_its_arguments(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(seed=3)
    begun = env.reset(env_id="FrozenLake-v1", env_kwargs={"is_slippery": False, "map_name": "4x4"}, seed=1).observation
    assert (begun.observation, begun.action_space["n"]) == (0, 4)
    path = [2, 2, 1, 1, 1, 2]  # right, right, down, down, down, right
    result = [env.step({"action": move}) for move in path][-1]
    assert (result.reward, result.done, env.state().env_id) == (1.0, True, "FrozenLake-v1")
    assert env.reset().observation.env_id == "CartPole-v1"


def test_without_a_seed_one_is_drawn_and_shown_in_the_state(env: SyncLocalEnv[Any, Any, Any]) -> None:
    first = env.reset().observation.observation
    assert np.array_equal(env.reset(seed=env.state().seed).observation.observation, first)


def test_spaces_of_arrays_and_maps_and_options_are_passed_on(env: SyncLocalEnv[Any, Any, Any]) -> None:
    begun = env.reset(env_id="Lamp-v0", env_kwargs={"size": 6}, options={"light": 0.5})
    assert begun.observation.observation["light"] == pytest.approx([0.5])
    assert begun.metadata["size"] == 6
    result = env.step({"action": [0.25]})
    assert (result.reward, result.done) == (0.25, False)
    assert env.step({"action": [1.0]}).done


def test_pictures_are_metadata_or_the_observation_itself(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(env_id="Lamp-v0", render=True)
    picture = env.step({"action": [1.0]}).metadata["render"]
    assert (picture.size, picture.getpixel((0, 0))) == ((4, 4), (255, 255, 255))
    begun = env.reset(env_id="Lamp-v0", pixels=True, options={"light": 1.0}).observation
    assert begun.observation_space == {"type": "Box", "low": 0, "high": 255, "shape": [4, 4, 3], "dtype": "|u1"}
    assert begun.observation.shape == (4, 4, 3)
    assert "render" not in begun.metadata
    assert env.step({"action": [0.0]}).observation.observation.max() == 0
    assert "render" not in env.reset(env_id="Lamp-v0").metadata


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "CartPole-v99"}, "CartPole"),
        ({"env_id": "CartPol-v1"}, "CartPole"),  # Gymnasium suggests a near name
        ({"env_id": "os:CartPole-v1"}, "GYMNASIUM_ENV_ID"),
        ({"env_kwargs": {"render_mode": "human"}}, "render=True"),
        ({"env_kwargs": {"colour": 1}}, "colour"),
        ({"split": "none"}, "train, test"),
        ({"split": "test", "index": 100}, "0 to 99"),
    ],
)
def test_a_reset_that_is_not_possible_says_why_and_keeps_the_episode(
    env: SyncLocalEnv[Any, Any, Any], arguments: dict[str, Any], message: str
) -> None:
    env.reset(seed=3)
    with pytest.raises(ExecutionError, match=message):
        env.reset(**arguments)
    assert env.step({"action": 0}).reward == 1.0


@pytest.mark.parametrize("action", [2, -1, 0.5, "left", None, [0]])
def test_an_action_outside_the_space_is_refused_and_the_episode_goes_on(
    env: SyncLocalEnv[Any, Any, Any], action: Any
) -> None:
    env.reset(seed=3)
    with pytest.raises(ExecutionError, match="CartPole-v1 does not take this action"):
        env.step({"action": action})
    assert env.step({"action": 0}).reward == 1.0


def test_the_page_shows_bars_or_the_picture_and_a_button_for_each_action() -> None:
    world = GymnasiumEnvironment()
    begun = world.reset(seed=3).model_dump(mode="json", fallback=lambda value: value.tolist())
    assert (world.render_web(begun) or "").count("<rect") == 4
    assert world.web_actions(begun) == [("0", {"action": 0}), ("1", {"action": 1})]
    world.reset(env_id="Lamp-v0")
    assert world.web_actions({}) == []
    assert "data:image/png" in (world.render_web({"observation": [[[1, 2, 3]]]}) or "")
    assert "data:image/gif" in (world.render_web({"metadata": {"render": "data:image/gif;base64,"}}) or "")
    assert world.render_web({"observation": {"light": [1]}}) is None
    assert world.render_web({"observation": ["a"]}) is None


def test_tasks_are_seeds_that_the_splits_do_not_share(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = GymnasiumEnvironment()
    train, test = world.list_tasks("train"), world.list_tasks("test")
    assert (len(train), len(test)) == (world.num_tasks("train"), world.num_tasks("test")) == (1000, 100)
    assert {task["seed"] for task in train}.isdisjoint(task["seed"] for task in test)
    env.reset(split="test", index=7)
    assert env.state().seed == test[7]["seed"] == world.get_task("test", 7)["seed"]


def test_the_typed_client_gets_arrays_over_the_wire(serve_env: Callable[..., Served]) -> None:
    with GymnasiumEnv(base_url=serve_env(app).url).sync() as env:
        result = env.reset(env_id="Lamp-v0", pixels=True, options={"light": 1.0})
        assert isinstance(result.observation, GymnasiumObservation)
        assert np.asarray(result.observation.observation).shape == (4, 4, 3)
        assert env.step(GymnasiumAction(action=[0.5])).reward == 0.5
        assert isinstance(env.state(), GymnasiumState)


@pytest.mark.slow
def test_the_installed_package_is_served_and_played(try_package: Callable[..., list[float]]) -> None:
    def choose(observation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        return {"action": chance.randrange(2)}

    returns = try_package("gymnasium_env", choose, most_steps=500)
    assert len(returns) == 100
    assert 8 <= min(returns) < max(returns)
