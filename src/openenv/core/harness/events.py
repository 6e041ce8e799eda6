"""Facade: events of turn-based agents. The code is in `openenv.harness.turns`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.harness.turns import HarnessClientMessage as HarnessClientMessage
from openenv.harness.turns import HarnessEvent as HarnessEvent
from openenv.harness.turns import HarnessEventType as HarnessEventType
from openenv.harness.turns import HarnessProtocolError as HarnessProtocolError
from openenv.harness.turns import HarnessResponse as HarnessResponse
from openenv.harness.turns import events_to_metadata as events_to_metadata

export_imports(__name__)
