"""PettingZoo as it is on PyPI, served and used; `make test-trainers` sets its environment up."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

pytest.importorskip("pettingzoo", reason="it has an environment of its own: make test-trainers")

import pettingzoo
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.test import api_test, parallel_api_test
from pettingzoo.utils.conversions import parallel_to_aec

from openenv import GenericEnvClient, create_app
from openenv.adapters.pettingzoo import ServedAECEnv, ServedParallelEnv, pettingzoo_environment
from openenv.client.vector.vector_env import VectorEnv
from openenv.errors import RequestValidationError
from openenv.server.loading import TargetError, load_app
from openenv.server.vectors.pool import LocalPool
from openenv.server.web.web_page import attach_web
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


def test_an_environment_in_a_process_of_this_machine_does_the_same() -> None:
    env = ServedParallelEnv(pettingzoo_environment(Tug))
    assert isinstance(env._env._pool, LocalPool)
    np.testing.assert_equal(played(env), played(Tug()))
    parallel_api_test(ServedParallelEnv(pettingzoo_environment(Tug)), num_cycles=60)


def test_a_vector_of_them_steps_in_several_processes() -> None:
    with VectorEnv(pettingzoo_environment(Tug), 3, workers=2, autoreset="disabled") as envs:
        envs.reset(seed=5)
        result = envs.step([{"actions": {"left": slot % 2, "right": 1}} for slot in range(3)])
        assert [fields["observations"]["left"][0] for fields in result.observations] == [1.0, 0.0, 1.0]


def test_it_passes_pettingzoos_own_tests(tug: str) -> None:
    parallel_api_test(ServedParallelEnv(tug), num_cycles=60)
    api_test(parallel_to_aec(ServedParallelEnv(tug)), num_cycles=60)


def test_wrong_actions_are_refused_and_the_episode_goes_on(tug: str) -> None:
    with GenericEnvClient(tug).sync() as client:
        client.reset()
        with pytest.raises(RequestValidationError, match="the action of left: 7 is not in Discrete"):
            client.step({"actions": {"left": 7, "right": 0}})
        with pytest.raises(RequestValidationError, match="unknown agent"):
            client.step({"actions": {"up": 1}})
        with pytest.raises(RequestValidationError, match="an action for each"):
            client.step({"actions": {"left": 1}})
        result = client.step({"actions": {"left": 0, "right": 1}})
    assert result.observation["observations"]["left"][0] == 1.0


def test_a_parallel_environment_in_the_form_of_turns_is_served_as_parallel() -> None:
    cls = pettingzoo_environment(lambda: parallel_to_aec(Tug()))
    with serve(create_app(cls, cls.action_cls, cls.observation_cls)) as served:
        assert len(played(ServedParallelEnv(served.url))) == 7


def test_what_is_no_such_environment_is_refused(tug: str) -> None:
    with pytest.raises(TypeError, match="is not a PettingZoo environment"):
        pettingzoo_environment(dict)


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tictactoe() -> Iterator[str]:
    with serve(load_app("pettingzoo:classic/tictactoe_v3")) as served:
        yield served.url


def turns_of(env: Any) -> list[Any]:
    """Play the first legal square of each view; player 2 tries an illegal one in the third round."""
    env.reset(seed=1)
    seen: list[Any] = []
    for agent in env.agent_iter():
        view, reward, terminated, truncated, info = env.last()
        seen.append((agent, view, reward, terminated, truncated, info, dict(env.rewards), list(env.agents)))
        if terminated or truncated:
            env.step(None)
        else:
            is_cheat = agent == "player_2" and len(seen) >= 5
            env.step(0 if is_cheat else int(np.flatnonzero(view["action_mask"])[0]))
    env.close()
    return seen


@pytest.mark.parametrize("place", ["a server", "a process of this machine"])
def test_turns_are_those_of_pettingzoo(tictactoe: str, place: str) -> None:
    env = ServedAECEnv(tictactoe if place == "a server" else "pettingzoo:classic/tictactoe_v3")
    ours, theirs = turns_of(env), turns_of(pettingzoo.make("aec", "classic/tictactoe_v3"))
    assert [turn[0] for turn in ours[:3]] == ["player_1", "player_2", "player_1"]
    assert len(ours) == len(theirs)
    np.testing.assert_equal(ours, theirs)


def test_an_environment_of_turns_passes_pettingzoos_own_tests(tictactoe: str) -> None:
    api_test(ServedAECEnv(tictactoe), num_cycles=60)


def test_only_the_agent_whose_turn_it_is_acts(tictactoe: str) -> None:
    with GenericEnvClient(tictactoe).sync() as client:
        start = client.reset(seed=1).observation
        assert (start["agents"], start["acting"]) == (["player_1", "player_2"], ["player_1"])
        with pytest.raises(RequestValidationError, match=r"an action for each of \['player_1'\]"):
            client.step({"actions": {"player_2": 0}})
        second = client.step({"actions": {"player_1": 0}}).observation
        assert second["acting"] == ["player_2"]
        assert second["observations"]["player_2"]["action_mask"] == [0, *[1] * 8]
        for agent, square in (("player_2", 3), ("player_1", 1), ("player_2", 4)):
            client.step({"actions": {agent: square}})
        end = client.step({"actions": {"player_1": 2}})
    assert (end.done, end.observation["rewards"]) == (True, {"player_1": 1.0, "player_2": -1.0})
    assert (end.observation["agents"], end.observation["acting"]) == ([], [])


def test_the_parallel_interface_uses_the_action_of_the_acting_agent(tictactoe: str) -> None:
    env = ServedParallelEnv(tictactoe)
    env.reset(seed=1)
    rewards: dict[str, float] = {}
    squares = iter([0, 3, 1, 4, 2])
    while env.agents:
        square = next(squares)
        _, rewards, *_ = env.step(dict.fromkeys(env.agents, square))
    env.close()
    assert rewards == {"player_1": 1.0, "player_2": -1.0}


def test_agents_that_act_at_the_same_time_are_not_served_in_turns(tug: str) -> None:
    with pytest.raises(ValueError, match="use parallel_to_aec"):
        ServedAECEnv(tug)


# -- targets ----------------------------------------------------------------------------------------------------------


def test_a_target_has_typed_actions_and_pictures() -> None:
    with serve(load_app("pettingzoo:classic/rps_v2")) as served, GenericEnvClient(served.url).sync() as client:
        schema = httpx2.get(f"{served.url}/schema", trust_env=False).json()["action"]
        agents = schema["properties"]["actions"]["properties"]
        assert agents["player_1"] == {"title": "player_1", "type": "integer", "minimum": 0, "maximum": 2}
        assert "render" not in client.reset(seed=1).observation["metadata"]
        drawn = client.reset(seed=1, render=True).observation["metadata"]["render"]
        assert np.asarray(drawn).shape[-1] == 3 or drawn["mime_type"] == "image/png"
        end = client.step({"actions": {"player_0": 1, "player_1": 0}})
    assert end.observation["rewards"] == {"player_0": 1.0, "player_1": -1.0}


def test_a_target_may_be_a_module_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from pettingzoo import make\n\ndef env(**kwargs):\n    return make('aec', 'classic/tictactoe_v3', **kwargs)\n"
    )
    (tmp_path / "my_own_game.py").write_text(text + "nothing = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for target in ("my_own_game", "my_own_game:env"):
        with serve(load_app(f"pettingzoo:{target}")) as served:
            assert ServedAECEnv(served.url).possible_agents == ["player_1", "player_2"]
    with pytest.raises(TargetError, match="no function nothing"):
        load_app("pettingzoo:my_own_game:nothing")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("classic/chequers_v1", "not found in registry"),
        ("classic/tictactoe_v9", "Available version: v3"),
        ("no_such_game", "no module no_such_game"),
        ("json", "no function parallel_env or env"),
        ("collections:OrderedDict", "OrderedDict is not a PettingZoo environment"),
        ("", "cannot be served"),
    ],
)
def test_an_unknown_target_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        load_app(f"pettingzoo:{name}")


def test_the_web_page_plays_a_turn() -> None:
    app = load_app("pettingzoo:classic/tictactoe_v3")
    attach_web(app)
    with serve(app) as served, httpx2.Client(base_url=served.url, trust_env=False) as page:
        page.get("/web/")  # sets the visitor's cookie
        described = page.get("/web/page").json()
        assert list(described["action"]["schema"]["properties"]["actions"]["properties"]) == ["player_1", "player_2"]
        assert page.post("/web/reset", json={"seed": 1}).status_code == 200
        answer = page.post("/web/step", json={"action": {"actions": {"player_1": 4}}})
        assert answer.json()["observation"]["acting"] == ["player_2"]
        for agent, action, reason in (("player_2", 9, "the action of player_2"), ("player_1", 0, "an action for each")):
            refused = page.post("/web/step", json={"action": {"actions": {agent: action}}})
            assert (refused.status_code, reason in refused.text) == (422, True)


def test_the_snippets_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    cls = runpy.run_path(str(SNIPPETS / "rock_paper.py"))["RockPaperScissors"]
    with serve(create_app(cls, cls.action_cls, cls.observation_cls)) as served:
        text = (SNIPPETS / "use_pettingzoo.py").read_text().replace("http://localhost:8000", served.url)
        exec(compile(text, "use_pettingzoo.py", "exec"), {})
    assert capsys.readouterr().out == "{'player_0': -3.0, 'player_1': 3.0}\n"
