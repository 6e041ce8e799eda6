"""Facade: events of turn-based agents. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.turns.turns import HarnessResponse as HarnessResponse
from openenv.adapters.turns.turns import events_to_metadata as events_to_metadata
from openenv.protocol.turn_messages import HarnessClientMessage as HarnessClientMessage
from openenv.protocol.turn_messages import HarnessEvent as HarnessEvent
from openenv.protocol.turn_messages import HarnessEventType as HarnessEventType
from openenv.protocol.turn_messages import HarnessProtocolError as HarnessProtocolError

export_imports(__name__)
