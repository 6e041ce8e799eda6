"""What an environment says of itself: its docstring, the files of its package, the scores of its rubric's parts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from openenv import Action, Environment, LocalEnv, Observation, State
from openenv.env.rubrics import Rubric, Sequential, WeightedSum

SOURCE = '''
from openenv import Action, Environment, Observation, State

class Maze(Environment[Action, Observation, State]):
    """Find the way
    out.

    More about it.
    """
    def reset(self):
        return Observation()
    def step(self, action):
        return Observation()
'''


@pytest.mark.parametrize(
    ("manifest", "project", "name", "version"),
    [
        ("name: maze_env\nversion: 0.3.0\n", '[project]\nversion = "9.9"\n', "maze_env", "0.3.0"),
        (
            "name: maze_env\n",
            '[build]\nversion = "1"\n[project]\nname = "x"\nversion = "0.4.1"\n[tool]\n',
            "maze_env",
            "0.4.1",
        ),
        ("[not a mapping]\n", None, "Maze", "1.0.0"),
        (None, '[project]\nversion = "0.5"\n', "Maze", "1.0.0"),
    ],
)
def test_name_and_version_come_from_the_files_of_the_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manifest: str | None,
    project: str | None,
    name: str,
    version: str,
) -> None:
    folder = tmp_path / "described_maze" / "server"
    folder.mkdir(parents=True)
    (folder / "rules.py").write_text(SOURCE, encoding="utf-8")
    for file, text in (("openenv.yaml", manifest), ("pyproject.toml", project)):
        if text is not None:
            (folder.parent / file).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("described_maze", "described_maze.server", "described_maze.server.rules"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
    maze = importlib.import_module("described_maze.server.rules").Maze
    described = maze().get_metadata()
    assert (described.name, described.description, described.version) == (name, "Find the way out.", version)


class Right(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return float(observation.metadata["right"])


class Short(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return 0.5


class Judged(Environment[Action, Observation, State]):
    def __init__(self) -> None:
        self.rubric = Sequential(Right(), WeightedSum([Short(), Short()], [0.5, 0.5]))

    def reset(self, **kwargs: Any) -> Observation:
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        observation = Observation(metadata={"right": self.state.step_count == 1})
        observation.reward = self.rubric_reward(action, observation)
        return observation


def test_the_scores_of_a_rubrics_parts_are_in_the_metadata() -> None:
    with LocalEnv(Judged).sync() as env:
        env.reset()
        first = env.step(Action())
        scores = {"Right": 1.0, "WeightedSum": 0.5, "WeightedSum.Short_0": 0.5, "WeightedSum.Short_1": 0.5}
        assert (first.reward, first.metadata) == (0.5, {"right": True, "rubric_scores": scores})
        second = env.step(Action())  # the second part is not asked, and its old score is no score of this step
        assert (second.reward, (second.metadata or {})["rubric_scores"]) == (0.0, {"Right": 0.0})


def test_a_rubric_without_parts_is_its_own_part_and_no_rubric_is_zero() -> None:
    env = Judged()
    env.rubric = Short()
    observation = env.step(Action())
    assert (observation.reward, observation.metadata["rubric_scores"]) == (0.5, {"Short": 0.5})
    env.rubric = None
    assert "rubric_scores" not in env.step(Action()).metadata


def test_an_asynchronous_rubric_is_awaited() -> None:
    class Slow(Rubric):
        async def forward(self, action: Any, observation: Any) -> float:
            return 0.25

    class Patient(Judged):
        async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            observation = Observation()
            observation.reward = await self.rubric_reward_async(action, observation)
            return observation

    class SlowJudge(Patient):
        def __init__(self) -> None:
            self.rubric = Slow()

    with LocalEnv(SlowJudge).sync() as env:
        env.reset()
        result = env.step(Action())
        assert (result.reward, result.metadata) == (0.25, {"rubric_scores": {"Slow": 0.25}})
