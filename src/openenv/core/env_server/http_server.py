"""Facade: servers and application factories. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.environment import Environment as Environment
from openenv.errors import ConcurrencyConfigurationError as ConcurrencyConfigurationError
from openenv.errors import EnvironmentFactoryError as EnvironmentFactoryError
from openenv.errors import SessionCapacityError as SessionCapacityError
from openenv.protocol.json_values import serialize_observation as serialize_observation
from openenv.protocol.jsonrpc import JsonRpcErrorCode as JsonRpcErrorCode
from openenv.protocol.jsonrpc import JsonRpcRequest as JsonRpcRequest
from openenv.protocol.jsonrpc import JsonRpcResponse as JsonRpcResponse
from openenv.protocol.jsonrpc import McpMethod as McpMethod
from openenv.protocol.jsonrpc import WSMCPMessage as WSMCPMessage
from openenv.protocol.jsonrpc import WSMCPResponse as WSMCPResponse
from openenv.protocol.schema import deserialize_action as deserialize_action
from openenv.protocol.tool_messages import CallToolAction as CallToolAction
from openenv.protocol.tool_messages import CallToolObservation as CallToolObservation
from openenv.protocol.tool_messages import ListToolsAction as ListToolsAction
from openenv.protocol.tool_messages import ListToolsObservation as ListToolsObservation
from openenv.server.app import HTTPEnvServer as HTTPEnvServer
from openenv.server.app import create_app as create_app
from openenv.server.app import create_fastapi_app as create_fastapi_app
from openenv.server.routes import GetEndpointConfig as GetEndpointConfig
from openenv.server.routes import register_get_endpoints as register_get_endpoints
from openenv.types import Action as Action
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
from openenv.types import WSObservationResponse as WSObservationResponse
from openenv.types import WSResetMessage as WSResetMessage
from openenv.types import WSStateMessage as WSStateMessage
from openenv.types import WSStateResponse as WSStateResponse
from openenv.types import WSStepMessage as WSStepMessage

export_imports(__name__)
