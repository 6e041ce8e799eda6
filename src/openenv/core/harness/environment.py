"""Facade: agents as environments. The code is in `openenv.harness.harness_environment`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.harness.harness_environment import HarnessAction as HarnessAction
from openenv.harness.harness_environment import HarnessEnvironment as HarnessEnvironment

export_imports(__name__)
