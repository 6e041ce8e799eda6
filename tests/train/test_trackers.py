"""Trackers: numbers and tables of samples reach every tracker, and a failing tracker does not stop the training."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from openenv.errors import PackageUnavailable
from openenv.rollout.capture.training_trace import RolloutTurn
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.tasks.task import Task
from openenv.train import EpisodeSample, SampleGroup, TrackedRun, Tracker, group_metrics, open_tracker, sample_rows
from openenv.train.trackers import TRACKERS, Trackers


def group(name: str, *rewards: float | None, text: str = "The answer.") -> SampleGroup:
    samples = []
    for place, reward in enumerate(rewards):
        turns = [
            RolloutTurn(turn=1, completion_tokens=[text, f" {place}"], finish_reason="length" if place else "stop")
        ]
        status: Any = "env_failed" if reward is None else "ok"
        samples.append(EpisodeSample(Outcome(rollout_id=f"{name}{place}", status=status, reward=reward, turns=turns)))
    return SampleGroup(name, {}, samples, task=Task(instruction=f"Do {name}."))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Broken(Tracker):
    """Fails in every method."""

    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        raise OSError("no space left")

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        raise OSError("no space left")

    def finish(self, *, failed: bool) -> None:
        raise OSError("no space left")


class Remembering(Tracker):
    """Remembers how runs ended: whether they failed."""

    ends: ClassVar[list[bool]] = []

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        pass

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        pass

    def finish(self, *, failed: bool) -> None:
        self.ends.append(failed)


def test_metrics_and_samples_are_lines_of_json(tmp_path: Path) -> None:
    run = TrackedRun(name="a run/7", folder=tmp_path, config={"lr": 1e-5, "folder": tmp_path})
    with open_tracker("jsonl", run) as tracker:
        tracker.log({"loss": 0.5, "absent": None, "bad": float("nan")}, 1)
        tracker.log({"loss": True}, 2)
        tracker.log_samples([group("one", 1.0, 0.0), group("two", None)], 2)
        tracker.log_table("empty", [], 2)
    folder = tmp_path / "a-run-7"
    first, second = lines(folder / "metrics.jsonl")
    assert (first["step"], first["loss"], first["bad"], "absent" in first, second["loss"]) == (1, 0.5, None, False, 1.0)
    rows = lines(folder / "samples.jsonl")
    assert [(row["step"], row["group"], row["sample"], row["reward"]) for row in rows] == [
        (2, "one", 0, 1.0),
        (2, "two", 0, None),
        (2, "one", 1, 0.0),
    ]
    assert (rows[0]["task"], rows[0]["answers"]) == ("Do one.", "The answer. 0")
    assert json.loads((folder / "config.json").read_text())["lr"] == 1e-5
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl", "samples.jsonl"]


def test_a_run_continues_only_on_request(tmp_path: Path) -> None:
    for resume in (False, True):
        with open_tracker("jsonl", TrackedRun(name="r", folder=tmp_path, resume=resume)) as tracker:
            tracker.log({"loss": 1.0}, 1)
    assert len(lines(tmp_path / "r" / "metrics.jsonl")) == 2
    with pytest.raises(FileExistsError, match="resume=True"):
        open_tracker("jsonl", TrackedRun(name="r", folder=tmp_path))


def test_a_failing_tracker_is_logged_once_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        Trackers([Broken(), open_tracker("jsonl", TrackedRun(name="r", folder=tmp_path))]) as tracker,
    ):
        for step in (1, 2):
            tracker.log({"loss": 1.0}, step)
            tracker.log_samples([group("one", 1.0)], step)
    assert [record.getMessage() for record in caplog.records] == ["Broken failed: no space left"]
    assert len(lines(tmp_path / "r" / "metrics.jsonl")) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_every_tracker_learns_once_how_the_run_ended(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.train.trackers.TRACKERS", {**TRACKERS, "first": Remembering, "last": Remembering})
    trackers = open_tracker(["first", "jsonl", "last"], TrackedRun(name="r", folder=tmp_path))
    Remembering.ends.clear()
    with contextlib.suppress(KeyError), trackers:
        if fails:
            raise KeyError
    assert Remembering.ends == [fails, fails]


def test_a_single_tracker_is_opened_as_itself(tmp_path: Path) -> None:
    assert type(open_tracker("jsonl", TrackedRun(name="r", folder=tmp_path))).__name__ == "JsonlTracker"


def test_trackers_that_are_open_end_if_a_later_one_cannot_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: TrackedRun) -> Tracker:
        raise OSError("no space left")

    added = {"remembering": Remembering, "refusing": refuse}
    monkeypatch.setattr("openenv.train.trackers.TRACKERS", {**TRACKERS, **added})
    Remembering.ends.clear()
    with pytest.raises(OSError, match="no space left"):
        open_tracker(["remembering", "refusing"], TrackedRun(name="r", folder=tmp_path))
    assert Remembering.ends == [True]


def test_a_value_that_is_no_number_is_an_error_at_once(tmp_path: Path) -> None:
    with open_tracker([], TrackedRun(name="r", folder=tmp_path)) as tracker, pytest.raises(TypeError, match="'loss'"):
        tracker.log({"loss": [1, 2]}, 1)
    assert not (tmp_path / "r").exists()


def test_unknown_names_and_empty_run_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose from jsonl, tensorboard, trackio, wandb"):
        open_tracker(["jsonl", "mlflow"], TrackedRun(name="r", folder=tmp_path))
    with pytest.raises(ValueError, match="letter or digit"):
        TrackedRun(name="../")


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(PackageUnavailable, match=rf"pip install '{name}>="):
        open_tracker(["jsonl", name], TrackedRun(name="r", folder=tmp_path))
    assert set(TRACKERS) == {"jsonl", "tensorboard", "trackio", "wandb"}


def test_metrics_of_groups_separate_failures_from_rewards() -> None:
    metrics = group_metrics([group("one", 1.0, 0.0), group("two", 0.0, None)])
    assert metrics["train/reward"] == pytest.approx(1 / 3)
    assert (metrics["train/groups_with_spread"], metrics["train/unscored"]) == (0.5, 1.0)
    assert metrics["train/cut_off"] == pytest.approx(1 / 3)
    assert metrics["train/status/env_failed"] == 0.25
    silent = SampleGroup("silent", {}, [EpisodeSample(Outcome(rollout_id="s", status="ok", reward=1.0))])
    assert group_metrics([silent])["train/tokens_excluded"] == 0.0, "nothing was sampled, so nothing is excluded"
    assert group_metrics([])["train/groups"] == 0.0


def test_samples_come_from_as_many_groups_as_possible() -> None:
    groups = [group(name, 0.0, 1.0) for name in "abc"]
    assert [(row["group"], row["sample"]) for row in sample_rows(groups, 1, limit=4)] == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
        ("a", 1),
    ]
    (row,) = sample_rows([group("a", 1.0, text="x" * 9000)], 1)
    assert len(row["answers"]) < 4100
    assert "[... 5002 characters ...]" in row["answers"]


def test_texts_that_utf_8_cannot_encode_are_written(tmp_path: Path) -> None:
    with open_tracker("jsonl", TrackedRun(name="r", folder=tmp_path)) as tracker:
        tracker.log_table("samples", [{"answers": row["answers"]} for row in sample_rows([group("a", 1.0)], 1)], 1)
        tracker.log_table("odd", [{"text": "\ud800"}], 1)
    assert lines(tmp_path / "r" / "odd.jsonl") == [{"step": 1, "text": "\ud800"}]
