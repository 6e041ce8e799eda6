"""`openenv play`: what it prints, keeps, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from environments import Idle
from openenv import create_app
from openenv.cli.__main__ import build
from openenv.cli.rollouts import rollouts
from openenv.rollout.store.store import RolloutStore
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.types import Action, Observation


class Word(Action):
    text: str


class Door(Idle):
    """Opens to `sesame`; `crash` breaks it."""

    def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        if action.text == "crash":
            raise RuntimeError("the door fell out")
        is_right = action.text == "sesame"
        return Observation(reward=float(is_right), done=is_right)


@pytest.fixture
def door() -> Iterator[str]:
    with serve(create_app(Door, Word, Observation, max_concurrent_envs=8)) as served:
        yield served.url


def played(url: str, first: str, *options: str) -> Any:
    with ScriptedModel(Script(name="player", turns=[Turn(text=first)], ending="sesame")) as model:
        address = model.model()
        arguments = ["play", url, "--llm-url", address["base_url"], "--model", address["name"], *options]
        return CliRunner().invoke(build(["play"]), arguments)


def test_the_summary_and_the_store(door: str, tmp_path: Path) -> None:
    result = played(door, "open", "-n", "3", "--samples", "2", "--store", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "mean reward  1.000 ± 0.000 (from 1 to 1)" in result.output
    assert "episodes     6, 2.0 replies each; 0 truncated" in result.output
    with RolloutStore(tmp_path, create=False) as store:
        assert len(list(store.find())) == 6


def test_an_object_per_episode(door: str) -> None:
    result = played(door, "open", "-n", "2", "--json", "--max-turns", "1")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["status"], row["reward"], row["turns"]) for row in rows] == [("truncated", 0.0, 1)] * 2
    assert sorted(row["start"]["seed"] for row in rows) == [1, 2]


def test_a_broken_environment_is_no_reward(door: str) -> None:
    result = played(door, "crash", "-n", "1")
    assert result.exit_code == 1
    assert "failed       1 without a reward; the last reason" in result.output
    assert "the door fell out" in result.output


def test_without_a_server_it_says_so() -> None:
    result = played("http://127.0.0.1:9", "open")
    assert result.exit_code == 1
    assert "Is the server running?" in result.output


def test_a_stored_episode_is_branched(door: str, tmp_path: Path) -> None:
    played(door, "open", "-n", "1", "--store", str(tmp_path))
    with RolloutStore(tmp_path) as store:
        [parent] = store.find()

    def branched(*options: str) -> Any:
        with ScriptedModel(
            Script(name="player", turns=[Turn(text="open"), Turn(text="please")], ending="sesame")
        ) as model:
            address = model.model()
            endpoint = ["--llm-url", address["base_url"], "--model", address["name"], "--store", str(tmp_path)]
            return CliRunner().invoke(rollouts, ["branch", parent.rollout_id[:8], *endpoint, *options])

    result = branched("--at", "1", "-n", "2", "--json")
    assert result.exit_code == 0, result.output
    outcomes = json.loads(result.stdout)
    assert [outcome["start"]["call"] for outcome in outcomes] == [1, 1]
    assert "1 of 2 continue in forks" in result.stderr
    assert branched("--at", "1", "-n", "1", "--url", door).exit_code == 0
    assert "has no answer after call 2; branch at 0 to 1" in branched("--at", "2").output
    assert branched("--at", "1", "--seed", "3").exit_code == 2
