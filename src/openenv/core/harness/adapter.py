"""Facade: adapters of turn-based agents. The code is in `openenv.harness.turns`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.errors import HarnessError as HarnessError
from openenv.errors import HarnessNotRunningError as HarnessNotRunningError
from openenv.errors import HarnessStartupError as HarnessStartupError
from openenv.errors import HarnessTurnTimeoutError as HarnessTurnTimeoutError
from openenv.harness.turns import AgenticHarnessAdapter as AgenticHarnessAdapter

export_imports(__name__)
