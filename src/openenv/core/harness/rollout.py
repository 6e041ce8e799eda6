"""Facade: sessions, adapters and the rollout function for trainers. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.training_trace import TraceEntry as TraceEntry
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

export_imports(__name__)
