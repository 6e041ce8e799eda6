"""verifiers as it is on PyPI, both ways; `make test-trainers` sets its environment up."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="it has an environment of its own: make test-trainers")

import verifiers.v1 as vf
from typer.testing import CliRunner

from guess_environment import Guess, Hint, Word
from openenv import GenericEnvClient, create_app
from openenv.adapters.verifiers import verifiers_environment
from openenv.cli.__main__ import build
from openenv.errors import ExecutionError
from openenv.testing import Script, ScriptedModel, Turn, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SNIPPETS = Path(__file__).parents[3] / "docs_src"
PLAIN = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of harnesses are started with uv, which this environment has."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "packages"))


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with serve(create_app(Guess, Word, Hint, max_concurrent_envs=8)) as served:
        yield served.url


def evaluate(config: dict[str, Any], model: ScriptedModel) -> list[Any]:
    """Run an episode of each task, as verifiers' own evaluation does."""
    env = vf.load_environment(vf.resolve_env_config(config))
    address = model.model()
    client = vf.EvalClientConfig(base_url=address["base_url"], api_key_var="NO_KEY")
    context = vf.ModelContext(model=address["name"], client=client)

    async def play() -> list[Any]:
        async with env.serving():
            slots = [slot for task in env.taskset for slot in env.slots(task)]
            return [await env.run_slot(slot, context) for slot in slots]

    return asyncio.run(play())


def talker(*answers: str, ending: str = "yes") -> ScriptedModel:
    return ScriptedModel(Script(name="talker", turns=[Turn(text=text) for text in answers], ending=ending))


def said(episode: Any) -> list[tuple[str, str]]:
    return [(node.message.role, node.message.content) for node in episode.traces[0].nodes]


def test_a_served_environment_is_a_taskset(guess: str) -> None:
    with talker("no") as model:
        episodes = evaluate({"taskset": {"id": "openenv_taskset", "url": guess, "seeds": 2}}, model)
    assert [episode.ok for episode in episodes] == [True, True]
    assert [episode.traces[0].reward for episode in episodes] == [0.75, 0.75]
    (role, prompt), *others = said(episodes[1])
    assert (role, prompt.splitlines()[-1]) == ("user", "Begin 1.")
    assert others == [
        ("assistant", "no"),
        ("user", "no is wrong."),
        ("assistant", "yes"),
    ]


def test_a_failure_is_an_error_and_no_reward(guess: str) -> None:
    with talker("no", "crash") as model:
        (episode,) = evaluate({"taskset": {"id": "openenv_taskset", "url": guess}}, model)
    assert not episode.ok
    assert "broken" in episode.errors[0].message
    assert all("openenv_reward" not in trace.rewards for trace in episode.traces)


def test_the_openenv_taskset_of_verifiers_itself_works(guess: str) -> None:
    config = {"taskset": {"id": "openenv", "base_url": guess, "resets": [{"seed": 4}]}, "player": PLAIN}
    with talker("no") as model:
        (episode,) = evaluate(config, model)
    assert (episode.ok, episode.traces[0].reward) == (True, 0.75)


# ---- the other way ----


@pytest.fixture
def backwards() -> Iterator[str]:
    cls = verifiers_environment({"taskset": {"id": "backwards"}, "agent": PLAIN})
    with serve(create_app(cls, cls.action_cls, cls.observation_cls, max_concurrent_envs=4)) as served:
        yield served.url
    assert cls._host._thread is not None
    assert not cls._host._thread.is_alive()  # the last session stopped everything


def test_an_environment_of_verifiers_is_served(backwards: str) -> None:
    with GenericEnvClient(backwards).sync() as client, GenericEnvClient(backwards).sync() as other:
        first = client.reset(task=1)
        assert first.observation["messages"][-1]["content"] == "Write salt backwards."
        second = other.reset(task=2)
        assert second.observation["messages"][-1]["content"] == "Write bread backwards."
        last = client.step({"content": "tlas"})
        assert (last.reward, last.done) == (1.0, True)
        assert last.metadata["metrics"]["length"] == 4.0
        assert other.step({"content": "no"}).reward == 0.0
        with pytest.raises(ExecutionError, match="reset begins one"):
            client.step({"content": "tlas"})
        client.reset(seed=0)  # given up
        again = client.reset(seed=3)  # the first word again
        assert again.observation["messages"][-1]["content"] == "Write tea backwards."


def test_an_episode_that_verifiers_cannot_play_has_no_reward(backwards: str) -> None:
    with GenericEnvClient(backwards).sync() as client:
        client.reset(task=0)
        with pytest.raises(ExecutionError, match="could not play"):
            client.step({"content": "crash"})
        client.reset(task=0)
        assert client.step({"content": "aet"}).reward == 1.0


def test_the_snippet_of_the_page() -> None:
    cls = runpy.run_path(str(SNIPPETS / "serve_verifiers.py"))["Backwards"]
    assert cls.config.taskset.id == "backwards"


def test_an_imported_package_is_served_and_its_tests_pass(tmp_path: Path) -> None:
    source = Path(__file__).parent / "packages" / "backwards"
    done = CliRunner().invoke(build(["import"]), ["import", str(source), "-n", "backwards_env", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    command = [sys.executable, "-m", "pytest", "-q", str(tmp_path / "backwards_env")]
    tests = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert tests.returncode == 0, tests.stdout
