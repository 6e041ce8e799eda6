"""`InspectAIHarness`: run evaluations with Inspect AI and return the scores as plain numbers."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from openenv.errors import install_command

from .evaluation import EvalHarness

logger = logging.getLogger(__name__)

_OPTIONS = frozenset(
    (
        *("model_base_url", "model_args", "model_roles", "task_args", "solver", "scorer", "epochs", "limit"),
        *("sample_id", "sample_shuffle", "max_samples", "max_tasks", "max_connections", "message_limit", "token_limit"),
        *(
            "time_limit",
            "working_limit",
            "fail_on_error",
            "retry_on_error",
            "tags",
            "metadata",
            "display",
            "log_format",
        ),
        *("log_level", "temperature", "max_tokens", "top_p", "top_k", "seed", "stop_seqs", "system_message"),
        *("timeout", "max_retries", "reasoning_effort", "reasoning_tokens", "cache", "sandbox"),
    )
)
"""The keys of `eval_parameters` that go to Inspect's `eval` under the same name."""


class InspectAIHarness(EvalHarness):
    """Runs Inspect AI tasks. Importing this needs no inspect-ai, `run` does.

    `eval_parameters` has `model` (such as `openai/gpt-4o`), and may have `task` (by default the dataset) and arguments
    of `inspect_ai.eval`: `task_args`, `model_args`, `max_samples`, `max_connections`, `temperature`, `max_tokens`,
    `epochs`, `solver`, `scorer`, `model_base_url` and more. One that is None counts as not given.

    Args:
        log_dir: The folder of the logs; by default Inspect's own.
    """

    def __init__(self, *, log_dir: str | None = None) -> None:
        self.log_dir = log_dir

    def run(
        self,
        harness_version: str,
        library_versions: dict[str, str],
        dataset: str,
        eval_parameters: dict[str, Any],
    ) -> dict[str, Any]:
        """Run an evaluation and return its metrics by name.

        Where several scorers have a metric of the same name, the scorer's name comes before it: `match/accuracy`.

        Args:
            harness_version: The version of inspect-ai that is meant; another one that is installed is logged.
            library_versions: Likewise of other packages.
            dataset: The task to run where `eval_parameters` names none.
            eval_parameters: See the class.

        Raises:
            ImportError: inspect-ai is not installed.
            ValueError: The model is missing, or there is no such parameter.
            RuntimeError: The evaluation did not come to its end.
        """
        try:
            from inspect_ai import eval as run_eval
        except ImportError as exc:
            raise ImportError(f"inspect-ai is required for InspectAIHarness: {install_command('inspect')}") from exc
        model = eval_parameters.get("model")
        if model is None:
            raise ValueError("eval_parameters must have a 'model', such as 'openai/gpt-4o' or 'mockllm/model'")
        # Unknown keys fail here, because Inspect would ignore some of them.
        options = self._options(eval_parameters)
        _compare_versions({"inspect-ai": harness_version, **library_versions})
        # Inspect's `eval` has no parameter for a scorer and ignores one: the scorer has to run on its log.
        parameters = inspect.signature(run_eval).parameters
        scorer = options.pop("scorer", None) if "score" in parameters and "scorer" not in parameters else None
        if scorer is not None:
            options["score"] = False
        logs = run_eval(eval_parameters.get("task", dataset), model=model, **options)
        # No task matched the name: not an empty success.
        if not logs:
            raise RuntimeError("The evaluation returned no logs: check the names of the task and the model")
        # One failed log makes the metrics of the whole evaluation meaningless.
        for log in logs:
            if log.status != "success":
                message = getattr(log.error, "message", None)
                why = f" ({message})" if isinstance(message, str) else ""
                raise RuntimeError(f"The evaluation failed with status: {log.status}{why}")
        if scorer is not None:
            logs = [_scored(log, scorer) for log in logs]
        return _flattened(logs)

    def _options(self, eval_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `inspect_ai.eval`."""
        unknown = [name for name in eval_parameters if name not in _OPTIONS | {"model", "task"}]
        if unknown:
            # Parameters of a configuration file are typed by hand.
            near = difflib.get_close_matches(unknown[0], sorted(_OPTIONS), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"eval_parameters has an unknown key {unknown[0]!r}{hint}")
        options = {name: value for name, value in eval_parameters.items() if name in _OPTIONS and value is not None}
        for name in ("task_args", "model_args"):
            if not options.get(name):
                options.pop(name, None)
        # A text names a registered solver; Inspect's function wants its specification.
        if isinstance(options.get("solver"), str):
            from inspect_ai.solver import SolverSpec

            options["solver"] = SolverSpec(options["solver"])
        if self.log_dir is not None:
            options["log_dir"] = self.log_dir
        return options


def _scored(log: Any, scorer: Any) -> Any:
    """Score a log that has no scores yet, also in its file."""
    from inspect_ai import score
    from inspect_ai.log import write_eval_log

    scored = score(log, scorer, action="overwrite", display="none")
    # The file on disk should show the scores, too.
    if log.location:
        write_eval_log(scored, log.location)
    return scored


def _flattened(logs: Sequence[Any]) -> dict[str, Any]:
    rows = [
        (f"{log.eval.task}/" if len(logs) > 1 else "", score, name, metric.value)
        for log in logs
        if log.results is not None
        for score in log.results.scores
        for name, metric in score.metrics.items()
    ]
    # A metric name is unique, or it gets the scorer's name as a prefix.
    times = Counter((task, name) for task, _, name, _ in rows)
    return {
        f"{task}{name}" if times[task, name] == 1 else f"{task}{score.name}/{name}": value
        for task, score, name, value in rows
    }


def _compare_versions(versions: Mapping[str, str]) -> None:
    """Log a warning if a configuration names another version than the installed one."""
    for package, version in versions.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if installed != version:
            logger.warning("The configuration names %s %s, installed is %s", package, version, installed)
