"""Facade: evaluation harnesses. Re-exports only; the code lives in `openenv.adapters.inspect`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.inspect.evaluation import EvalConfig as EvalConfig
from openenv.adapters.inspect.evaluation import EvalHarness as EvalHarness
from openenv.adapters.inspect.evaluation import EvalResult as EvalResult
from openenv.adapters.inspect.inspect_evaluation import InspectAIHarness as InspectAIHarness

export_imports(__name__)
