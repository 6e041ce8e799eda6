"""Facade: Inspect AI as a harness. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.inspect.evaluation import EvalHarness as EvalHarness
from openenv.adapters.inspect.inspect_evaluation import InspectAIHarness as InspectAIHarness

export_imports(__name__)
