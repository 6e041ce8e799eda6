"""PettingZoo as it is on PyPI, served and used; `make test-trainers` sets its environment up."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo", reason="it has an environment of its own: make test-trainers")

from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.test import api_test, parallel_api_test
from pettingzoo.utils.conversions import parallel_to_aec

from openenv import GenericEnvClient, create_app
from openenv.adapters.pettingzoo import ServedParallelEnv, pettingzoo_environment
from openenv.errors import RequestValidationError, ServerError
from openenv.testing import serve

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]
SNIPPETS = Path(__file__).parents[3] / "docs_src"


class Tug(ParallelEnv[str, Any, int]):
    """Two pull a rope; the first to be three ahead wins, and after 20 steps none does."""

    metadata = {"name": "tug_v0", "render_modes": []}  # noqa: RUF012 - as PettingZoo has it
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["left", "right"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-3, 3, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def look(self) -> dict[str, Any]:
        return {agent: np.array([self.at, self.steps % 2], np.float32) for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.at, self.steps = 0, 0
        return self.look(), {agent: {"seed": seed} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.at += int(actions["right"]) - int(actions["left"])
        self.steps += 1
        ended, cut = abs(self.at) == 3, self.steps == 20
        rewards = {"left": float(self.at == -3) - float(self.at == 3), "right": 0.0}
        rewards["right"] = -rewards["left"]
        living = dict.fromkeys(self.agents, ended), dict.fromkeys(self.agents, cut)
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if ended or cut:
            self.agents = []
        return self.look(), rewards, *living, infos


@pytest.fixture(scope="module")
def tug() -> Iterator[str]:
    cls = pettingzoo_environment(Tug)
    with serve(create_app(cls, cls.action_cls, cls.observation_cls, max_concurrent_envs=4)) as served:
        yield served.url


def played(env: Any) -> list[Any]:
    seen = [env.reset(seed=5)]
    while env.agents:
        seen.append(env.step({"left": len(seen) % 2, "right": 1}))
    env.close()
    return seen


def test_a_served_environment_does_what_it_does_here(tug: str) -> None:
    ours, theirs = played(ServedParallelEnv(tug)), played(Tug())
    assert len(ours) == len(theirs) == 7
    np.testing.assert_equal(ours, theirs)


def test_it_passes_pettingzoos_own_tests(tug: str) -> None:
    parallel_api_test(ServedParallelEnv(tug), num_cycles=60)
    api_test(parallel_to_aec(ServedParallelEnv(tug)), num_cycles=60)


def test_wrong_actions_are_refused_and_the_episode_goes_on(tug: str) -> None:
    with GenericEnvClient(tug).sync() as client:
        client.reset()
        with pytest.raises(RequestValidationError, match="is not in the action space of left"):
            client.step({"actions": {"left": 7, "right": 0}})
        with pytest.raises(RequestValidationError, match="unknown agent"):
            client.step({"actions": {"up": 1}})
        with pytest.raises(ServerError, match="an action for each"):
            client.step({"actions": {"left": 1}})
        result = client.step({"actions": {"left": 0, "right": 1}})
    assert result.observation["observations"]["left"][0] == 1.0


def test_an_environment_of_turns_is_served_too() -> None:
    cls = pettingzoo_environment(lambda: parallel_to_aec(Tug()))
    with serve(create_app(cls, cls.action_cls, cls.observation_cls)) as served:
        assert len(played(ServedParallelEnv(served.url))) == 7


def test_what_is_no_such_environment_is_refused(tug: str) -> None:
    with pytest.raises(TypeError, match="is not a PettingZoo environment"):
        pettingzoo_environment(dict)


def test_the_snippets_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    cls = runpy.run_path(str(SNIPPETS / "rock_paper.py"))["RockPaperScissors"]
    with serve(create_app(cls, cls.action_cls, cls.observation_cls)) as served:
        text = (SNIPPETS / "use_pettingzoo.py").read_text().replace("http://localhost:8000", served.url)
        exec(compile(text, "use_pettingzoo.py", "exec"), {})
    assert capsys.readouterr().out == "{'player_0': -3.0, 'player_1': 3.0}\n"
