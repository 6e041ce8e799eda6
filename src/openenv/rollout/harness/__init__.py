"""Harnesses: an agent loop on one side, a session with tools, messages and a verdict on the other.

`ResourceSession` is what an agent works in, `HarnessAdapter` is what runs one in it, and `build_harness_rollout_func`
makes of the two a function that trainers call. Knows interfaces and loops; must not know servers, sandboxes or agents.
"""

from __future__ import annotations

from openenv.tool_types import RESERVED_TOOL_NAMES

from .interface import (
    HarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    Message,
    ModelResponse,
    ModelStep,
    ModelStepResult,
    ResourceSession,
    ResourceSessionFactory,
    RolloutEvent,
    ToolCallLike,
    ToolResult,
    ToolTraceEntry,
    VerifyResult,
)
from .loops import CLIHarnessAdapter, MCPHarnessAdapter, SessionMCPBridge, build_harness_rollout_func
from .step_session import StepEnvSessionAdapter

__all__ = [
    "RESERVED_TOOL_NAMES",
    "CLIHarnessAdapter",
    "HarnessAdapter",
    "HarnessRolloutResult",
    "HarnessRunLimits",
    "MCPHarnessAdapter",
    "Message",
    "ModelResponse",
    "ModelStep",
    "ModelStepResult",
    "ResourceSession",
    "ResourceSessionFactory",
    "RolloutEvent",
    "SessionMCPBridge",
    "StepEnvSessionAdapter",
    "ToolCallLike",
    "ToolResult",
    "ToolTraceEntry",
    "VerifyResult",
    "build_harness_rollout_func",
]
