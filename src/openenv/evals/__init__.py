"""Evaluations: harnesses that run them, and Inspect AI in both directions. inspect-ai is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "EvalConfig": "openenv.evals.eval_harness",
    "EvalHarness": "openenv.evals.eval_harness",
    "EvalResult": "openenv.evals.eval_harness",
    "InspectAIHarness": "openenv.evals.inspect_harness",
    "import_inspect_log": "openenv.evals.inspect_logs",
    "write_inspect_logs": "openenv.evals.inspect_logs",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.evals.eval_harness import EvalConfig as EvalConfig
    from openenv.evals.eval_harness import EvalHarness as EvalHarness
    from openenv.evals.eval_harness import EvalResult as EvalResult
    from openenv.evals.inspect_harness import InspectAIHarness as InspectAIHarness
    from openenv.evals.inspect_logs import import_inspect_log as import_inspect_log
    from openenv.evals.inspect_logs import write_inspect_logs as write_inspect_logs

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
