"""Facade: evaluation harnesses. Re-exports only; the code lives in `openenv.evals`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.evals.eval_harness import EvalConfig as EvalConfig
from openenv.evals.eval_harness import EvalHarness as EvalHarness
from openenv.evals.eval_harness import EvalResult as EvalResult
from openenv.evals.inspect_harness import InspectAIHarness as InspectAIHarness

export_imports(__name__)
