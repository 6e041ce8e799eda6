"""Facade: sessions, adapters and what trainers call, on the module path that existing code imports."""

from __future__ import annotations

from openenv._lazy import export_imports
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

export_imports(__name__)
