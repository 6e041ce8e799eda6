"""Facade: agents as environments. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.turn_environment import HarnessAction as HarnessAction
from openenv.adapters.turns.turn_environment import HarnessEnvironment as HarnessEnvironment

export_imports(__name__)
