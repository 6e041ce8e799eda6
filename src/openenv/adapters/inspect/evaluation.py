"""`EvalHarness`: runs an evaluation; its configuration and its result are plain values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pydantic import BaseModel, ConfigDict


class EvalConfig(BaseModel):
    """The model and the dataset of an evaluation: enough to run it again."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    harness_name: str
    """The harness, such as `InspectAIHarness`."""
    harness_version: str
    library_versions: dict[str, str]
    """The versions of other packages in the evaluation."""
    dataset: str
    eval_parameters: dict[str, Any]
    """Arguments of the harness, such as `model`."""


class EvalResult(BaseModel):
    """The scores of an evaluation."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    config: EvalConfig
    scores: dict[str, Any]


class EvalHarness(ABC):
    """Runs evaluations; a subclass implements `run`."""

    @abstractmethod
    def run(
        self,
        harness_version: str,
        library_versions: dict[str, str],
        dataset: str,
        eval_parameters: dict[str, Any],
    ) -> dict[str, Any]:
        """Run an evaluation and return its scores by name; the arguments are the fields of `EvalConfig`."""

    def run_from_config(self, config: EvalConfig) -> EvalResult:
        """Run an evaluation and return its scores together with its configuration."""
        scores = self.run(
            harness_version=config.harness_version,
            library_versions=config.library_versions,
            dataset=config.dataset,
            eval_parameters=config.eval_parameters,
        )
        return EvalResult(config=config, scores=scores)

    @property
    def name(self) -> str:
        """The name of the harness: that of its class."""
        return type(self).__name__
