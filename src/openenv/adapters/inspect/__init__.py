"""Evaluations: harnesses that run them, and Inspect AI in both directions. inspect-ai is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "EvalConfig": "openenv.adapters.inspect.evaluation",
    "EvalHarness": "openenv.adapters.inspect.evaluation",
    "EvalResult": "openenv.adapters.inspect.evaluation",
    "InspectAIHarness": "openenv.adapters.inspect.inspect_evaluation",
    "import_inspect_log": "openenv.adapters.inspect.logs",
    "write_inspect_logs": "openenv.adapters.inspect.logs",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.adapters.inspect.evaluation import EvalConfig as EvalConfig
    from openenv.adapters.inspect.evaluation import EvalHarness as EvalHarness
    from openenv.adapters.inspect.evaluation import EvalResult as EvalResult
    from openenv.adapters.inspect.inspect_evaluation import InspectAIHarness as InspectAIHarness
    from openenv.adapters.inspect.logs import import_inspect_log as import_inspect_log
    from openenv.adapters.inspect.logs import write_inspect_logs as write_inspect_logs

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
