"""Facade: Inspect AI as a harness. The code is in `openenv.evals.inspect_harness`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.evals.eval_harness import EvalHarness as EvalHarness
from openenv.evals.inspect_harness import InspectAIHarness as InspectAIHarness

export_imports(__name__)
