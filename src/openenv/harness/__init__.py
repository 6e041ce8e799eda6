"""Agents with a loop of their own as environments: one step is one turn of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.errors": "HarnessError HarnessNotRunningError HarnessStartupError HarnessTurnTimeoutError",
        "openenv.harness.agent_process": "HarnessProcess",
        "openenv.harness.command_line": "CommandAdapter JsonLinesAdapter",
        "openenv.harness.harness_environment": "HarnessAction HarnessEnvironment",
        "openenv.harness.tool_bridge": "HarnessMCPBridge build_bridge_server",
        "openenv.harness.turns": """
            AgenticHarnessAdapter HarnessClientMessage HarnessConfig HarnessEvent HarnessEventType HarnessResponse
            HarnessTransport events_to_metadata resolve_tool_conflicts
        """,
    }
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.errors import HarnessError as HarnessError
    from openenv.errors import HarnessNotRunningError as HarnessNotRunningError
    from openenv.errors import HarnessStartupError as HarnessStartupError
    from openenv.errors import HarnessTurnTimeoutError as HarnessTurnTimeoutError
    from openenv.harness.agent_process import HarnessProcess as HarnessProcess
    from openenv.harness.command_line import CommandAdapter as CommandAdapter
    from openenv.harness.command_line import JsonLinesAdapter as JsonLinesAdapter
    from openenv.harness.harness_environment import HarnessAction as HarnessAction
    from openenv.harness.harness_environment import HarnessEnvironment as HarnessEnvironment
    from openenv.harness.tool_bridge import HarnessMCPBridge as HarnessMCPBridge
    from openenv.harness.tool_bridge import build_bridge_server as build_bridge_server
    from openenv.harness.turns import AgenticHarnessAdapter as AgenticHarnessAdapter
    from openenv.harness.turns import HarnessClientMessage as HarnessClientMessage
    from openenv.harness.turns import HarnessConfig as HarnessConfig
    from openenv.harness.turns import HarnessEvent as HarnessEvent
    from openenv.harness.turns import HarnessEventType as HarnessEventType
    from openenv.harness.turns import HarnessResponse as HarnessResponse
    from openenv.harness.turns import HarnessTransport as HarnessTransport
    from openenv.harness.turns import events_to_metadata as events_to_metadata
    from openenv.harness.turns import resolve_tool_conflicts as resolve_tool_conflicts

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
