"""`openenv train` and `train_policy`: small random models learn on a served environment and on tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner has an environment of its own: make test-trainers")

import anyio
from typer.testing import CliRunner

from openenv import Action, Environment, Observation, State
from openenv.cli.__main__ import build
from openenv.rollout import RolloutStore
from openenv.testing import serve
from openenv.train.learner import Policy, PolicyOptions, TrainingRun, train_policy
from small_policy import save_model

pytestmark = pytest.mark.timeout(600)


class Text(Action):
    text: str


class Shouting(Environment[Text, Observation, State]):
    """The share of capital letters in the answer is the reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None) -> Observation:
        return Observation()

    def step(self, action: Text) -> Observation:
        return Observation(reward=sum("A" <= letter <= "Z" for letter in action.text) / 8, done=True)


@pytest.fixture
def shouting() -> Iterator[str]:
    with serve(Shouting) as served:
        yield served.url


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_model(tmp_path / "model"))


def short_run(model: str, out: Path, **more: Any) -> TrainingRun:
    """Return the settings of a run of seconds."""
    lengths = {"groups": 4, "samples": 8, "concurrency": 32, "max_tokens": 8, "context": 256, "held_out": 4}
    return TrainingRun(model=model, out=out, device="cpu", **{"learning_rate": 3e-3, **lengths, **more})


def rows(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_policy_learns_and_the_run_keeps_what_happened(shouting: str, model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = short_run(model, out, env=shouting, updates=25, evaluate_every=25, checkpoint_every=10)
    last = anyio.run(train_policy, run)

    rewards = [row["train/reward"] for row in rows(out) if "train/reward" in row]
    assert len(rewards) == 25
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    held_out = [row["eval/reward"] for row in rows(out) if "eval/reward" in row]
    assert len(held_out) == 2
    assert held_out[1] > held_out[0]
    gaps = [row["update/gap"] for row in rows(out) if "update/gap" in row]
    assert gaps[0] < 1e-4  # later ones contain the update between sampling and training

    assert last == out / "checkpoints" / "000025"
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["000020", "000025"]
    assert Policy.load(str(last), PolicyOptions(device="cpu")).end_ids
    assert {"reward", "answers", "step"} <= rows(out, "samples")[0].keys()
    with RolloutStore(out / "rollouts", create=False) as store:
        assert len(list(store.find())) >= 25 * 32


def test_a_run_continues_from_its_last_checkpoint(shouting: str, model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = short_run(model, out, env=shouting, updates=2, evaluate_every=0)
    anyio.run(train_policy, run)
    with pytest.raises(FileExistsError, match="earlier run"):
        anyio.run(train_policy, run)
    with pytest.raises(ValueError, match="other values of seed"):
        anyio.run(train_policy, replace(run, resume=True, seed=1))

    last = anyio.run(train_policy, replace(run, resume=True, updates=4))
    assert last.name == "000004"
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]
    trained = [(group["group"], group["step"]) for group in rows(out, "samples")]
    starts = {number: {name for name, step in trained if step == number} for number in (1, 2, 3, 4)}
    assert not any(starts[one] & starts[other] for one in starts for other in starts if one < other)


def test_without_a_checkpoint_nothing_continues(model: str, tmp_path: Path) -> None:
    run = short_run(model, tmp_path / "run", tasks=["arithmetic"], updates=1, resume=True)
    with pytest.raises(ValueError, match="no checkpoint to continue from"):
        anyio.run(train_policy, run)


def test_the_command_trains_on_tasks(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for number in range(5):
        check = f"test -e f{number}.txt"
        (folder / f"t{number}.yaml").write_text(f"instruction: make f{number}.txt\nverify:\n  - {check}\n")
    out = tmp_path / "run"
    arguments = ["train", "--model", model, "--tasks", str(folder), "--tasks", "arithmetic", "--out", str(out)]
    arguments += ["--updates", "1", "--groups", "2", "--samples", "2", "--concurrency", "4", "--max-tokens", "8"]
    arguments += ["--held-out", "2", "--evaluate-every", "1", "--device", "cpu", "--max-turns", "1"]
    result = CliRunner().invoke(build(["train"]), arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out / "checkpoints" / "000001")
    assert "held-out reward 0" in result.stderr
    update = next(row for row in rows(out) if "train/reward" in row)
    assert update["train/samples"] == 4
    assert update["train/excluded_sequences"] == 0
    evaluated = next(row for row in rows(out) if "eval/reward" in row)
    assert evaluated["eval/tasks"] == 2  # one of the folder, one of the set


def test_a_server_that_is_not_there_ends_the_command_with_one_line(model: str, tmp_path: Path) -> None:
    arguments = ["train", "--model", model, "--env", "http://127.0.0.1:9", "--updates", "1", "--device", "cpu"]
    result = CliRunner().invoke(build(["train"]), [*arguments, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.output
    assert "Traceback" not in result.output


def test_the_server_is_asked_before_the_model_is_loaded(tmp_path: Path) -> None:
    arguments = ["train", "--model", str(tmp_path / "nothing"), "--env", "http://127.0.0.1:9", "--updates", "1"]
    result = CliRunner().invoke(build(["train"]), [*arguments, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.output


@pytest.mark.parametrize("device", ["tpu", "meta:x"])
def test_a_device_that_is_not_there_ends_the_command_with_one_line(device: str, shouting: str, tmp_path: Path) -> None:
    arguments = ["train", "--model", str(tmp_path / "nothing"), "--env", shouting, "--updates", "1"]
    options = [*arguments, "--device", device, "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(build(["train"]), options)
    assert result.exit_code == 1
    assert f"the device {device!r} cannot be used; choose cpu, cuda or auto" in result.output


def test_a_model_that_is_not_there_ends_the_command_with_one_line(shouting: str, tmp_path: Path) -> None:
    arguments = ["train", "--model", str(tmp_path / "nothing"), "--env", shouting, "--updates", "1"]
    result = CliRunner().invoke(build(["train"]), [*arguments, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "nothing" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"updates": 1}, "either the URL"),
        ({"updates": 1, "env": "http://x", "tasks": ["y"]}, "either the URL"),
        ({"env": "http://x"}, "never ends"),
        ({"env": "http://x", "updates": 1, "held_out": -1}, "at least 0"),
        ({"env": "http://x", "updates": 1, "agent": "opencode"}, "agent and processes are for tasks"),
        ({"tasks": ["y"], "updates": 1, "token": "secret"}, "token and text_only are for a served"),
        ({"tasks": ["y"], "updates": 1, "text_only": True}, "token and text_only are for a served"),
        ({"tasks": ["y"], "updates": 1, "agent": "opencode", "system_prompt": "z"}, "a system prompt of its own"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainingRun(model="tiny", **more)
