"""Facade: configurations and results of evaluations. The code is in `openenv.evals.eval_harness`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.evals.eval_harness import EvalConfig as EvalConfig
from openenv.evals.eval_harness import EvalResult as EvalResult

export_imports(__name__)
