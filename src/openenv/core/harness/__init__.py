"""Facade: rollout harnesses and turn-based agents on the module path that existing code imports. No logic here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.rollout.harness": """
            RESERVED_TOOL_NAMES CLIHarnessAdapter HarnessAdapter HarnessRolloutResult HarnessRunLimits LoopOwningSession
            MCPHarnessAdapter Message ModelStep ModelStepResult ResourceSession ResourceSessionFactory RolloutEvent
            SessionMCPBridge StepEnvSessionAdapter ToolResult ToolTraceEntry TrainableSession VerifyResult
            build_harness_rollout_func
        """,
        "openenv.rollout.training": "TraceEntry TrainingTrace TrainingTurn",
        "openenv.errors": "HarnessError HarnessNotRunningError HarnessStartupError HarnessTurnTimeoutError",
        "openenv.harness.turns": """
            AgenticHarnessAdapter HarnessClientMessage HarnessConfig HarnessEvent HarnessEventType HarnessResponse
            HarnessTransport events_to_metadata resolve_tool_conflicts
        """,
        "openenv.harness.agent_process": "HarnessProcess",
        "openenv.harness.tool_bridge": "HarnessMCPBridge build_bridge_server",
        "openenv.harness.harness_environment": "HarnessAction HarnessEnvironment",
    }
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.errors import HarnessError as HarnessError
    from openenv.errors import HarnessNotRunningError as HarnessNotRunningError
    from openenv.errors import HarnessStartupError as HarnessStartupError
    from openenv.errors import HarnessTurnTimeoutError as HarnessTurnTimeoutError
    from openenv.harness.agent_process import HarnessProcess as HarnessProcess
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
    from openenv.rollout.harness import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
    from openenv.rollout.harness import CLIHarnessAdapter as CLIHarnessAdapter
    from openenv.rollout.harness import HarnessAdapter as HarnessAdapter
    from openenv.rollout.harness import HarnessRolloutResult as HarnessRolloutResult
    from openenv.rollout.harness import HarnessRunLimits as HarnessRunLimits
    from openenv.rollout.harness import LoopOwningSession as LoopOwningSession
    from openenv.rollout.harness import MCPHarnessAdapter as MCPHarnessAdapter
    from openenv.rollout.harness import Message as Message
    from openenv.rollout.harness import ModelStep as ModelStep
    from openenv.rollout.harness import ModelStepResult as ModelStepResult
    from openenv.rollout.harness import ResourceSession as ResourceSession
    from openenv.rollout.harness import ResourceSessionFactory as ResourceSessionFactory
    from openenv.rollout.harness import RolloutEvent as RolloutEvent
    from openenv.rollout.harness import SessionMCPBridge as SessionMCPBridge
    from openenv.rollout.harness import StepEnvSessionAdapter as StepEnvSessionAdapter
    from openenv.rollout.harness import ToolResult as ToolResult
    from openenv.rollout.harness import ToolTraceEntry as ToolTraceEntry
    from openenv.rollout.harness import TrainableSession as TrainableSession
    from openenv.rollout.harness import VerifyResult as VerifyResult
    from openenv.rollout.harness import build_harness_rollout_func as build_harness_rollout_func
    from openenv.rollout.training import TraceEntry as TraceEntry
    from openenv.rollout.training import TrainingTrace as TrainingTrace
    from openenv.rollout.training import TrainingTurn as TrainingTurn

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
