"""Facade: servers and application factories. Re-exports only; the code lives in `openenv.server`."""

from __future__ import annotations

from openenv.env.environment import Environment
from openenv.errors import (
    ConcurrencyConfigurationError,
    EnvironmentFactoryError,
    SessionCapacityError,
)
from openenv.protocol.json_values import serialize_observation
from openenv.protocol.jsonrpc import (
    JsonRpcErrorCode,
    JsonRpcRequest,
    JsonRpcResponse,
    McpMethod,
    WSMCPMessage,
    WSMCPResponse,
)
from openenv.protocol.schema import (
    deserialize_action,
)
from openenv.server.app import (
    create_app,
    create_fastapi_app,
)
from openenv.server.compat import (
    HTTPEnvServer,
)
from openenv.server.routes import GetEndpointConfig, register_get_endpoints
from openenv.tool_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
)
from openenv.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    GetTaskRangeRequest,
    GetTaskRequest,
    HealthResponse,
    HealthStatus,
    ListTasksRequest,
    NumTasksRequest,
    Observation,
    ResetRequest,
    ResetResponse,
    SchemaResponse,
    ServerCapacityStatus,
    ServerMode,
    SessionInfo,
    State,
    StepRequest,
    StepResponse,
    WSCloseMessage,
    WSErrorCode,
    WSErrorResponse,
    WSObservationResponse,
    WSResetMessage,
    WSStateMessage,
    WSStateResponse,
    WSStepMessage,
)

__all__ = [
    "Action",
    "CallToolAction",
    "CallToolObservation",
    "ConcurrencyConfig",
    "ConcurrencyConfigurationError",
    "Environment",
    "EnvironmentFactoryError",
    "EnvironmentMetadata",
    "GetEndpointConfig",
    "GetTaskRangeRequest",
    "GetTaskRequest",
    "HTTPEnvServer",
    "HealthResponse",
    "HealthStatus",
    "JsonRpcErrorCode",
    "JsonRpcRequest",
    "JsonRpcResponse",
    "ListTasksRequest",
    "ListToolsAction",
    "ListToolsObservation",
    "McpMethod",
    "NumTasksRequest",
    "Observation",
    "ResetRequest",
    "ResetResponse",
    "SchemaResponse",
    "ServerCapacityStatus",
    "ServerMode",
    "SessionCapacityError",
    "SessionInfo",
    "State",
    "StepRequest",
    "StepResponse",
    "WSCloseMessage",
    "WSErrorCode",
    "WSErrorResponse",
    "WSMCPMessage",
    "WSMCPResponse",
    "WSObservationResponse",
    "WSResetMessage",
    "WSStateMessage",
    "WSStateResponse",
    "WSStepMessage",
    "create_app",
    "create_fastapi_app",
    "deserialize_action",
    "register_get_endpoints",
    "serialize_observation",
]
