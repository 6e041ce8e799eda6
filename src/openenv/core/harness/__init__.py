"""Facade: rollout harnesses on the module path that existing code imports. No logic lives here.

Names of the turn-based part and of the trace classes are not part of this release and say so when they are asked for.
"""

from __future__ import annotations

from openenv._lazy import missing_exports
from openenv.rollout.harness import (
    RESERVED_TOOL_NAMES,
    CLIHarnessAdapter,
    HarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    MCPHarnessAdapter,
    Message,
    ModelStep,
    ModelStepResult,
    ResourceSession,
    ResourceSessionFactory,
    RolloutEvent,
    SessionMCPBridge,
    StepEnvSessionAdapter,
    ToolResult,
    ToolTraceEntry,
    VerifyResult,
    build_harness_rollout_func,
)

__all__ = [
    "RESERVED_TOOL_NAMES",
    "CLIHarnessAdapter",
    "HarnessAdapter",
    "HarnessRolloutResult",
    "HarnessRunLimits",
    "MCPHarnessAdapter",
    "Message",
    "ModelStep",
    "ModelStepResult",
    "ResourceSession",
    "ResourceSessionFactory",
    "RolloutEvent",
    "SessionMCPBridge",
    "StepEnvSessionAdapter",
    "ToolResult",
    "ToolTraceEntry",
    "VerifyResult",
    "build_harness_rollout_func",
]

__getattr__ = missing_exports(
    __name__,
    (
        "AgenticHarnessAdapter",
        "HarnessAction",
        "HarnessClientMessage",
        "HarnessConfig",
        "HarnessEnvironment",
        "HarnessError",
        "HarnessEvent",
        "HarnessEventType",
        "HarnessMCPBridge",
        "HarnessNotRunningError",
        "HarnessProcess",
        "HarnessResponse",
        "HarnessStartupError",
        "HarnessTransport",
        "HarnessTurnTimeoutError",
        "LoopOwningSession",
        "TraceEntry",
        "TrainableSession",
        "TrainingTrace",
        "TrainingTurn",
        "build_bridge_server",
        "events_to_metadata",
        "resolve_tool_conflicts",
    ),
    "Turn-based harnesses",
)
