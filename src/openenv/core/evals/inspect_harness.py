"""Facade: Inspect AI as a harness. The code is in `openenv.adapters.inspect.inspect_evaluation`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.inspect.evaluation import EvalHarness as EvalHarness
from openenv.adapters.inspect.inspect_evaluation import InspectAIHarness as InspectAIHarness

export_imports(__name__)
