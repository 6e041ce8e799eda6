"""`InspectAIHarness` with Inspect AI as it is on PyPI; `make test-inspect` sets its environment up."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="it has an environment of its own: make test-inspect")

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import list_eval_logs, read_eval_log
from inspect_ai.scorer import exact, includes, match

from inspect_models import mock
from openenv.core.evals import EvalConfig, InspectAIHarness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
VERSION = version("inspect-ai")


def questions(*scorers: Any) -> Task:
    samples = [Sample(input="Two and two?", target="four"), Sample(input="And three?", target="seven")]
    return Task(dataset=MemoryDataset(samples), scorer=list(scorers) or includes())


@pytest.fixture
def harness(tmp_path: Path) -> InspectAIHarness:
    return InspectAIHarness(log_dir=str(tmp_path))


def run(harness: InspectAIHarness, task: Task, **parameters: Any) -> dict[str, Any]:
    return harness.run(VERSION, {}, "unused", {"task": task, "model": mock(["four it is"]), **parameters})


def test_metrics_come_back_by_name(harness: InspectAIHarness, tmp_path: Path) -> None:
    scores = run(harness, questions(), display="none")
    assert scores["accuracy"] == 0.5
    assert set(scores) == {"accuracy", "stderr"}
    assert len(list_eval_logs(str(tmp_path))) == 1


def test_a_configuration_runs(harness: InspectAIHarness) -> None:
    config = EvalConfig(
        harness_name=harness.name,
        harness_version=VERSION,
        library_versions={},
        dataset="questions",
        eval_parameters={"task": questions(), "model": mock(["four"]), "epochs": 2, "display": "none"},
    )
    result = harness.run_from_config(config)
    assert result.config is config
    assert result.scores["accuracy"] == 0.5


def test_metrics_of_the_same_name_have_their_scorers_names(harness: InspectAIHarness) -> None:
    scores = run(harness, questions(includes(), match()), display="none")
    assert scores["includes/accuracy"] == 0.5
    assert scores["match/accuracy"] == 0.0
    assert "accuracy" not in scores


def test_a_scorer_replaces_the_task_s(harness: InspectAIHarness, tmp_path: Path) -> None:
    scores = run(harness, questions(exact()), scorer=includes(), display="none")
    assert scores["accuracy"] == 0.5
    [log] = list_eval_logs(str(tmp_path))
    assert [score.name for score in read_eval_log(log).results.scores] == ["includes"]


def test_arguments_reach_the_model(harness: InspectAIHarness, tmp_path: Path) -> None:
    run(harness, questions(), temperature=0.25, max_tokens=7, limit=1, model_args={}, solver=None, display="none")
    [log] = list_eval_logs(str(tmp_path))
    read = read_eval_log(log)
    assert len(read.samples) == 1
    assert (read.plan.config.temperature, read.plan.config.max_tokens) == (0.25, 7)


def test_a_solver_is_named_by_its_registry_name(harness: InspectAIHarness, tmp_path: Path) -> None:
    run(harness, questions(), solver="openenv/run_agent", limit=1, display="none", fail_on_error=False)
    [log] = list_eval_logs(str(tmp_path))
    assert read_eval_log(log).eval.solver == "openenv/run_agent"


def test_a_missing_model_and_unknown_keys_are_refused(harness: InspectAIHarness) -> None:
    with pytest.raises(ValueError, match="'model'"):
        harness.run(VERSION, {}, "task", {})
    with pytest.raises(ValueError, match="unknown key 'max_sample'; did you mean 'max_samples'"):
        run(harness, questions(), max_sample=1)


def test_an_evaluation_that_fails_says_how(harness: InspectAIHarness) -> None:
    failing = mock([RuntimeError("out of credit")])
    with pytest.raises(RuntimeError, match=r"failed with status: error \(.*out of credit"):
        harness.run(VERSION, {}, "unused", {"task": questions(), "model": failing, "display": "none"})


def test_no_logs_are_an_error(harness: InspectAIHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_ai, "eval", lambda *args, **options: [])
    with pytest.raises(RuntimeError, match="returned no logs"):
        run(harness, questions())


def test_other_versions_than_the_configuration_names_are_logged(
    harness: InspectAIHarness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="openenv"):
        parameters = {"task": questions(), "model": mock(["four"]), "display": "none"}
        harness.run("0.0.1", {"pydantic": version("pydantic"), "absent-package": "1"}, "unused", parameters)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("openenv.adapters.inspect")]
    assert warnings == [f"The configuration names inspect-ai 0.0.1, installed is {VERSION}"]
