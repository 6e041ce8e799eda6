"""Facade: adapters of turn-based agents. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.turns import AgenticHarnessAdapter as AgenticHarnessAdapter
from openenv.errors import HarnessError as HarnessError
from openenv.errors import HarnessNotRunningError as HarnessNotRunningError
from openenv.errors import HarnessStartupError as HarnessStartupError
from openenv.errors import HarnessTurnTimeoutError as HarnessTurnTimeoutError

export_imports(__name__)
