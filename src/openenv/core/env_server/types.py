"""Facade: the shared models. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.types import Action as Action
from openenv.types import BaseMessage as BaseMessage
from openenv.types import CodeExecResult as CodeExecResult
from openenv.types import ConcurrencyConfig as ConcurrencyConfig
from openenv.types import EnvironmentMetadata as EnvironmentMetadata
from openenv.types import GetTaskRangeRequest as GetTaskRangeRequest
from openenv.types import GetTaskRequest as GetTaskRequest
from openenv.types import HealthResponse as HealthResponse
from openenv.types import HealthStatus as HealthStatus
from openenv.types import ListTasksRequest as ListTasksRequest
from openenv.types import NumTasksRequest as NumTasksRequest
from openenv.types import Observation as Observation
from openenv.types import ResetRequest as ResetRequest
from openenv.types import ResetResponse as ResetResponse
from openenv.types import Scalar as Scalar
from openenv.types import SchemaResponse as SchemaResponse
from openenv.types import ServerCapacityStatus as ServerCapacityStatus
from openenv.types import ServerMode as ServerMode
from openenv.types import SessionInfo as SessionInfo
from openenv.types import State as State
from openenv.types import StepRequest as StepRequest
from openenv.types import StepResponse as StepResponse
from openenv.types import WSCloseMessage as WSCloseMessage
from openenv.types import WSErrorCode as WSErrorCode
from openenv.types import WSErrorResponse as WSErrorResponse
from openenv.types import WSIncomingMessage as WSIncomingMessage
from openenv.types import WSObservationResponse as WSObservationResponse
from openenv.types import WSResetMessage as WSResetMessage
from openenv.types import WSStateMessage as WSStateMessage
from openenv.types import WSStateResponse as WSStateResponse
from openenv.types import WSStepMessage as WSStepMessage

export_imports(__name__)
