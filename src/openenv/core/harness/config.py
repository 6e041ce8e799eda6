"""Facade: the configuration of turn-based agents. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.turns import HarnessConfig as HarnessConfig
from openenv.adapters.turns.turns import HarnessTransport as HarnessTransport

export_imports(__name__)
