"""Facade: the configuration of turn-based agents. The code is in `openenv.harness.turns`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.harness.turns import HarnessConfig as HarnessConfig
from openenv.harness.turns import HarnessTransport as HarnessTransport

export_imports(__name__)
