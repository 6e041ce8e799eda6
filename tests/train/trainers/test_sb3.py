"""Stable-Baselines3 as it is on PyPI, with served environments; `make test-trainers` sets its environment up."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="it has an environment of its own: make test-trainers")

import gymnasium
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from openenv import create_app
from openenv.adapters.gymnasium import gymnasium_environment
from openenv.errors import SlotsFailed
from openenv.server.vectors.messages import HEADER
from openenv.server.vectors.pool import LocalPool
from openenv.testing import serve
from openenv.train.trainers.sb3 import ServedVecEnv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SNIPPETS = Path(__file__).parents[3] / "docs_src"


def served(cls: Any, **options: Any) -> Any:
    return serve(create_app(cls, cls.action_cls, cls.observation_cls, max_concurrent_envs=16, **options))


@pytest.fixture(scope="module")
def cart_pole() -> Iterator[str]:
    with served(gymnasium_environment("CartPole-v1", max_episode_steps=20)) as server:
        yield server.url


def play(envs: Any, steps: int = 60) -> list[Any]:
    """Push to both sides in turn, from seeded starts, and return everything that comes."""
    envs.seed(7)
    seen = [envs.reset()]
    for step in range(steps):
        observations, rewards, dones, infos = envs.step(np.full(envs.num_envs, step % 2))
        kept = [[info.get("terminal_observation"), bool(info.get("TimeLimit.truncated"))] for info in infos]
        if not dones.any():
            seen.append([observations, rewards, dones, kept])
            continue
        seen.append([observations.shape, rewards, dones, kept])  # the starts of later episodes are not seeded
        break
    envs.close()
    return seen


@pytest.mark.parametrize("place", ["a server", "processes of this machine"])
def test_it_does_what_its_own_vector_of_environments_does(cart_pole: str, place: str) -> None:
    if place == "a server":
        ours = play(ServedVecEnv(cart_pole, 3))
    else:
        ours = play(ServedVecEnv(gymnasium_environment("CartPole-v1", max_episode_steps=20), 3, workers=2))
    theirs = play(DummyVecEnv([lambda: gymnasium.make("CartPole-v1", max_episode_steps=20)] * 3))
    assert len(ours) == len(theirs)
    np.testing.assert_equal(ours, theirs)
    assert ours[-1][2].any()
    assert ours[-1][1].dtype == np.float32


def test_on_this_machine_steps_are_arrays_in_shared_memory() -> None:
    envs = ServedVecEnv("gymnasium:CartPole-v1", 3, workers=2)
    try:
        envs.reset()
        pool = envs._env._pool
        assert isinstance(pool, LocalPool)
        assert pool.layout is not None
        before = envs._env.traffic
        for _ in range(5):
            envs.step(np.zeros(3, np.int64))
        sent, received = (now - then for now, then in zip(envs._env.traffic, before, strict=True))
        assert max(sent, received) <= 5 * 2 * HEADER.size, "no more than a word for each worker and step"
    finally:
        envs.close()


def test_ppo_learns_over_it(cart_pole: str) -> None:
    envs = VecMonitor(ServedVecEnv(cart_pole, 8))
    model = PPO("MlpPolicy", envs, n_steps=32, batch_size=64, seed=0, device="cpu")
    model.learn(1024)
    rewards = [episode["r"] for episode in model.ep_info_buffer]
    assert len(rewards) > 10
    assert max(rewards) <= 20
    envs.close()


class Lamps(gymnasium.Env[Any, Any]):
    """A dictionary of spaces; the right action is in the observation."""

    observation_space = gymnasium.spaces.Dict(
        {"lamp": gymnasium.spaces.Discrete(3), "noise": gymnasium.spaces.Box(-1, 1, (2,), np.float32)}
    )
    action_space = gymnasium.spaces.Discrete(3)
    render_mode = None

    def __init__(self, render_mode: str | None = None) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def look(self) -> dict[str, Any]:
        self.lamp = int(self.np_random.integers(3))
        return {"lamp": self.lamp, "noise": np.zeros(2, np.float32)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 99:
            raise RuntimeError("broken")
        reward = float(action == self.lamp)
        self.steps += 1
        return self.look(), reward, self.steps == 5, False, {}


def test_dictionaries_of_observations_and_failures() -> None:
    with served(gymnasium_environment(Lamps)) as server:
        envs = ServedVecEnv(server.url, 4)
        observations = envs.reset()
        assert {key: value.shape for key, value in observations.items()} == {"lamp": (4,), "noise": (4, 2)}
        for _ in range(5):
            observations, rewards, dones, infos = envs.step(observations["lamp"])
            assert rewards.tolist() == [1.0] * 4
        assert dones.all()
        assert infos[0]["terminal_observation"]["noise"].shape == (2,)
        A2C("MultiInputPolicy", envs, n_steps=5, device="cpu").learn(40)
        assert envs.get_attr("render_mode") == [None] * 4
        for refused in (lambda: envs.set_attr("x", 1), lambda: envs.env_method("look"), lambda: envs.get_attr("x")):
            with pytest.raises(AttributeError):
                refused()
        envs.set_options([{"a": 1}, {}, {}, {}])
        with pytest.raises(ValueError, match="same options"):
            envs.reset()
        envs.close()


def test_a_session_that_fails_is_no_reward() -> None:
    with served(gymnasium_environment(Lamps)) as server:
        envs = ServedVecEnv(server.url, 2, to_action=lambda action: {"action": int(action)})
        envs.reset()
        with pytest.raises(SlotsFailed):
            envs.step(np.array([0, 99]))
        envs.close()


def test_the_snippet_of_the_page(cart_pole: str) -> None:
    train = runpy.run_path(str(SNIPPETS / "train_sb3.py"))["train"]
    assert train(cart_pole, sessions=4, steps=256).num_timesteps >= 256
