"""Agents that run their loop themselves, as environments: one step is one turn of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.errors": "HarnessError HarnessNotRunningError HarnessStartupError HarnessTurnTimeoutError",
        "openenv.adapters.turns.agent_process": "HarnessProcess",
        "openenv.adapters.turns.command_line": "CommandAdapter JsonLinesAdapter",
        "openenv.adapters.turns.turn_environment": "HarnessAction HarnessEnvironment",
        "openenv.adapters.turns.tool_bridge": "HarnessMCPBridge build_bridge_server",
        "openenv.adapters.turns.turns": """
            AgenticHarnessAdapter HarnessConfig HarnessResponse HarnessTransport events_to_metadata
            resolve_tool_conflicts
        """,
        "openenv.protocol.turn_messages": "HarnessClientMessage HarnessEvent HarnessEventType",
    }
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.adapters.turns.agent_process import HarnessProcess as HarnessProcess
    from openenv.adapters.turns.command_line import CommandAdapter as CommandAdapter
    from openenv.adapters.turns.command_line import JsonLinesAdapter as JsonLinesAdapter
    from openenv.adapters.turns.tool_bridge import HarnessMCPBridge as HarnessMCPBridge
    from openenv.adapters.turns.tool_bridge import build_bridge_server as build_bridge_server
    from openenv.adapters.turns.turn_environment import HarnessAction as HarnessAction
    from openenv.adapters.turns.turn_environment import HarnessEnvironment as HarnessEnvironment
    from openenv.adapters.turns.turns import AgenticHarnessAdapter as AgenticHarnessAdapter
    from openenv.adapters.turns.turns import HarnessConfig as HarnessConfig
    from openenv.adapters.turns.turns import HarnessResponse as HarnessResponse
    from openenv.adapters.turns.turns import HarnessTransport as HarnessTransport
    from openenv.adapters.turns.turns import events_to_metadata as events_to_metadata
    from openenv.adapters.turns.turns import resolve_tool_conflicts as resolve_tool_conflicts
    from openenv.errors import HarnessError as HarnessError
    from openenv.errors import HarnessNotRunningError as HarnessNotRunningError
    from openenv.errors import HarnessStartupError as HarnessStartupError
    from openenv.errors import HarnessTurnTimeoutError as HarnessTurnTimeoutError
    from openenv.protocol.turn_messages import HarnessClientMessage as HarnessClientMessage
    from openenv.protocol.turn_messages import HarnessEvent as HarnessEvent
    from openenv.protocol.turn_messages import HarnessEventType as HarnessEventType

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
