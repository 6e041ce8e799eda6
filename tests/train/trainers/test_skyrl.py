"""SkyRL-Gym as it is on PyPI, with served environments; `make test-trainers` sets its environment up."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("skyrl_gym", reason="it has an environment of its own: make test-trainers")

import skyrl_gym

from echo_env.server.app import app as echo_app
from guess_environment import Guess, Hint, Word
from openenv import create_app
from openenv.rollout.agents.served_episode import EpisodeFailed
from openenv.testing import serve

pytestmark = pytest.mark.slow
SNIPPETS = Path(__file__).parents[3] / "docs_src"
BEGIN = f"{Guess.__doc__}\n\nYour whole reply becomes the action's `text`.\n\nBegin 3."


@pytest.fixture(autouse=True)
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    """Register the environment, unless a test is about that."""
    if "snippet" not in request.node.name:
        skyrl_gym.register(id="openenv", entry_point="openenv.train.trainers.skyrl:ServedTextEnv")
    yield
    skyrl_gym.envs.deregister("openenv")


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with serve(create_app(Guess, Word, Hint, max_concurrent_envs=8)) as served:
        yield served.url


def test_an_episode_of_several_turns(guess: str) -> None:
    env = skyrl_gym.make("openenv", env_config={"url": guess}, extras={"extra_info": {"reset": {"seed": 3}}})
    conversation, _ = env.init([{"role": "system", "content": "Guess."}])
    assert conversation == [{"role": "system", "content": "Guess."}, {"role": "user", "content": BEGIN}]
    first = env.step("no")
    assert (first["reward"], first["done"]) == (-0.25, False)
    assert first["observations"] == [{"role": "user", "content": "no is wrong."}]
    last = env.step("yes")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"turns": 2, "ended": 1.0}
    env.close()


def test_the_system_message_comes_first_and_only_once(guess: str) -> None:
    env = skyrl_gym.make("openenv", env_config={"url": guess, "system": "Guess!"}, extras={"reset": {"seed": 3}})
    ask, own, first = ({"role": "user", "content": "Ready?"}, {"role": "system", "content": "Guess."}, BEGIN)
    begin = {"role": "user", "content": first}
    assert env.init([ask])[0] == [{"role": "system", "content": "Guess!"}, ask, begin]
    assert env.init([own, ask])[0] == [own, ask, begin]
    env.close()


def test_turns_are_limited_and_a_failure_is_no_reward(guess: str) -> None:
    env = skyrl_gym.make("openenv", env_config={"url": guess, "max_turns": 2}, extras={})
    env.init([])
    assert [env.step("no")["done"], env.step("no")["done"]] == [False, True]
    env.init([])
    with pytest.raises(EpisodeFailed, match="broken"):
        env.step("crash")
    env.init([])
    assert env.step("yes")["reward"] == 1.0
    env.close()
    with pytest.raises(ValueError, match="url"):
        skyrl_gym.make("openenv", env_config={}, extras={})


def test_tools_are_called_in_writing() -> None:
    with serve(echo_app) as served:
        env = skyrl_gym.make("openenv", env_config={"url": served.url}, extras={})
        (opening,), _ = env.init([])
        assert "echo_message" in opening["content"]
        call = 'I call it: {"tool_name": "echo_message", "arguments": {"message": "hi"}}'
        assert env.step(call)["observations"] == [{"role": "user", "content": "hi"}]
        assert "JSON object" in env.step("Hello.")["observations"][0]["content"]
        env.close()


def test_the_snippet_of_the_page(guess: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SNIPPETS / "train_skyrl.py"))["play"](guess)
    assert capsys.readouterr().out.endswith("\n\nBegin 1.\n-0.25 False\n1.0 True\n")
