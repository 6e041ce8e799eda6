"""Facade: configurations and results of evaluations. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.inspect.evaluation import EvalConfig as EvalConfig
from openenv.adapters.inspect.evaluation import EvalResult as EvalResult

export_imports(__name__)
