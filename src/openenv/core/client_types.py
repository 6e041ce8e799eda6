"""Facade: results of clients. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.types import ObsT as ObsT
from openenv.types import StateT as StateT
from openenv.types import StepResult as StepResult

export_imports(__name__)
