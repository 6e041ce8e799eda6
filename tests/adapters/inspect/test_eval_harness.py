"""Evaluation harnesses: their values, their base class, and what they say where inspect-ai is missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from pydantic import ValidationError

from openenv.core.evals import EvalConfig, EvalHarness, EvalResult, InspectAIHarness

CONFIG = {
    "harness_name": "Counting",
    "harness_version": "1.0",
    "library_versions": {"numpy": "2.0"},
    "dataset": "words",
    "eval_parameters": {"model": "mockllm/model"},
}


class Counting(EvalHarness):
    """Returns what it was called with."""

    def run(
        self,
        harness_version: str,
        library_versions: dict[str, str],
        dataset: str,
        eval_parameters: dict[str, Any],
    ) -> dict[str, Any]:
        return {"version": harness_version, "libraries": library_versions, "dataset": dataset, **eval_parameters}


def test_a_harness_runs_a_configuration_and_returns_both() -> None:
    config = EvalConfig(**CONFIG)
    result = Counting().run_from_config(config)
    assert result == EvalResult(
        config=config,
        scores={"version": "1.0", "libraries": {"numpy": "2.0"}, "dataset": "words", "model": "mockllm/model"},
    )
    assert Counting().name == "Counting"
    assert InspectAIHarness().name == "InspectAIHarness"


def test_values_allow_no_other_keys_and_check_what_is_assigned() -> None:
    with pytest.raises(ValidationError):
        EvalConfig(**CONFIG, more=1)
    with pytest.raises(ValidationError):
        EvalConfig(**{name: value for name, value in CONFIG.items() if name != "dataset"})
    config = EvalConfig(**CONFIG)
    with pytest.raises(ValidationError):
        config.library_versions = "none"  # type: ignore[assignment]
    with pytest.raises(ValidationError):
        EvalResult(config=config, scores={}, more=1)  # type: ignore[call-arg]


def test_a_harness_without_run_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        EvalHarness()  # type: ignore[abstract]


def test_without_inspect_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    harness = InspectAIHarness(log_dir="logs")
    assert harness.log_dir == "logs"
    with pytest.raises(ImportError, match=r"inspect-ai is required.*pip install 'inspect-ai>="):
        harness.run("0.3", {}, "words", {"model": "mockllm/model"})
