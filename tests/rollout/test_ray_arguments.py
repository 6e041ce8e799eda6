"""Arguments of rollouts on Ray: what is refused before a cluster is asked, also where Ray is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openenv.cli.rollouts import rollouts
from openenv.errors import RolloutError
from openenv.rollout import CaptureServer, EngineOptions, RayCluster, RayEngine, Task, run_many

TASK = Task(instruction="x")


def test_without_ray_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RolloutError, match=r"pip install 'ray\[default\]>="):
        run_many([TASK], agent="noop", on="ray")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"on": "spark"}, "on must be 'ray' or a RayCluster, not 'spark'"),
        ({"retries": 1}, "retries needs a cluster"),
        ({"on": "ray", "retries": -1}, "retries must be 0 or more"),
        ({"on": "ray", "concurrency": 0}, "concurrency must be at least 1"),
        ({"on": "ray", "agent": "opencode"}, "needs a model"),
    ],
)
def test_arguments_that_are_not_possible_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_many([TASK], **{"agent": "noop", **arguments})


def test_a_capture_proxy_of_this_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capture cannot be given"):
        RayEngine(EngineOptions(agent="noop", capture=CaptureServer(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"address": ""}, "address must be HOST:PORT"),
        ({"address": "ray://head:10001"}, "is Ray Client, which cannot stream results"),
        ({"cpus": -1}, "cpus must be 0 or more"),
        ({"cpus": float("nan")}, "cpus must be 0 or more"),
        ({"start_timeout_s": 0}, "start_timeout_s must be greater than 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RayCluster(**arguments)


def test_as_many_workers_fit_as_the_scarcest_resource_allows() -> None:
    cluster = RayCluster(cpus=0.5, resources={"sandboxes": 2})
    assert cluster.fits({"CPU": 4.0, "sandboxes": 5.0}) == 2
    assert cluster.fits({"CPU": 0.9, "sandboxes": 5.0}) == 1
    assert cluster.fits({"CPU": 4.0}) == 0
    assert RayCluster(cpus=0).fits({}) == 1


@pytest.mark.parametrize(
    ("address", "words"),
    [("auto", "Ray is not installed: pip install 'ray[default]>="), ("ray://head:10001", "is Ray Client")],
)
def test_the_command_says_what_is_wrong(
    address: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "task.yaml").write_text("instruction: x\n")
    arguments = ["run", str(tmp_path / "task.yaml"), "--agent", "noop", "--store", str(tmp_path / "store")]
    done = CliRunner().invoke(rollouts, [*arguments, "--ray", address])
    assert done.exit_code == 1
    assert words in " ".join((done.output + done.stderr).split())
