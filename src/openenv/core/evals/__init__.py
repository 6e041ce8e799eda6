"""Facade: evaluation harnesses. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.adapters.inspect.evaluation import EvalConfig as EvalConfig
    from openenv.adapters.inspect.evaluation import EvalHarness as EvalHarness
    from openenv.adapters.inspect.evaluation import EvalResult as EvalResult
    from openenv.adapters.inspect.inspect_evaluation import InspectAIHarness as InspectAIHarness

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.adapters.inspect.evaluation": "EvalConfig EvalHarness EvalResult",
                "openenv.adapters.inspect.inspect_evaluation": "InspectAIHarness",
            }
        ),
    )
