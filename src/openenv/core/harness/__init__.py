"""Facade: rollout harnesses and turn-based agents. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.adapters.turns.agent_process import HarnessProcess as HarnessProcess
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
    from openenv.rollout.capture.training_trace import TraceEntry as TraceEntry
    from openenv.rollout.capture.training_trace import TrainingTrace as TrainingTrace
    from openenv.rollout.capture.training_trace import TrainingTurn as TrainingTurn
    from openenv.rollout.run.agent_sessions import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
    from openenv.rollout.run.agent_sessions import CLIHarnessAdapter as CLIHarnessAdapter
    from openenv.rollout.run.agent_sessions import HarnessAdapter as HarnessAdapter
    from openenv.rollout.run.agent_sessions import HarnessRolloutResult as HarnessRolloutResult
    from openenv.rollout.run.agent_sessions import HarnessRunLimits as HarnessRunLimits
    from openenv.rollout.run.agent_sessions import LoopOwningSession as LoopOwningSession
    from openenv.rollout.run.agent_sessions import MCPHarnessAdapter as MCPHarnessAdapter
    from openenv.rollout.run.agent_sessions import Message as Message
    from openenv.rollout.run.agent_sessions import ModelStep as ModelStep
    from openenv.rollout.run.agent_sessions import ModelStepResult as ModelStepResult
    from openenv.rollout.run.agent_sessions import ResourceSession as ResourceSession
    from openenv.rollout.run.agent_sessions import ResourceSessionFactory as ResourceSessionFactory
    from openenv.rollout.run.agent_sessions import RolloutEvent as RolloutEvent
    from openenv.rollout.run.agent_sessions import SessionMCPBridge as SessionMCPBridge
    from openenv.rollout.run.agent_sessions import StepEnvSessionAdapter as StepEnvSessionAdapter
    from openenv.rollout.run.agent_sessions import ToolResult as ToolResult
    from openenv.rollout.run.agent_sessions import ToolTraceEntry as ToolTraceEntry
    from openenv.rollout.run.agent_sessions import TrainableSession as TrainableSession
    from openenv.rollout.run.agent_sessions import VerifyResult as VerifyResult
    from openenv.rollout.run.agent_sessions import build_harness_rollout_func as build_harness_rollout_func

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.adapters.turns.agent_process": "HarnessProcess",
                "openenv.adapters.turns.tool_bridge": "HarnessMCPBridge build_bridge_server",
                "openenv.adapters.turns.turn_environment": "HarnessAction HarnessEnvironment",
                "openenv.adapters.turns.turns": """
                AgenticHarnessAdapter HarnessConfig HarnessResponse HarnessTransport
                events_to_metadata resolve_tool_conflicts
            """,
                "openenv.errors": "HarnessError HarnessNotRunningError HarnessStartupError HarnessTurnTimeoutError",
                "openenv.protocol.turn_messages": "HarnessClientMessage HarnessEvent HarnessEventType",
                "openenv.rollout.capture.training_trace": "TraceEntry TrainingTrace TrainingTurn",
                "openenv.rollout.run.agent_sessions": """
                CLIHarnessAdapter HarnessAdapter HarnessRolloutResult HarnessRunLimits
                LoopOwningSession MCPHarnessAdapter Message ModelStep ModelStepResult
                RESERVED_TOOL_NAMES ResourceSession ResourceSessionFactory RolloutEvent
                SessionMCPBridge StepEnvSessionAdapter ToolResult ToolTraceEntry TrainableSession
                VerifyResult build_harness_rollout_func
            """,
            }
        ),
    )
