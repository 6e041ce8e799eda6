"""Facade: everything that serves an environment, on the module path that existing code imports."""

from __future__ import annotations

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Environment": "openenv.env.environment",
    "Transform": "openenv.env.environment",
    "TaskProvider": "openenv.env.environment",
    "Message": "openenv.env.environment",
    "ModelTokenizer": "openenv.env.environment",
    "Action": "openenv.types",
    "Observation": "openenv.types",
    "State": "openenv.types",
    "SchemaResponse": "openenv.types",
    "HealthResponse": "openenv.types",
    "ListTasksRequest": "openenv.types",
    "NumTasksRequest": "openenv.types",
    "GetTaskRequest": "openenv.types",
    "GetTaskRangeRequest": "openenv.types",
    "HealthStatus": "openenv.types",
    "ServerMode": "openenv.types",
    "WSErrorCode": "openenv.types",
    "BaseMessage": "openenv.types",
    "WSIncomingMessage": "openenv.types",
    "WSResetMessage": "openenv.types",
    "WSStepMessage": "openenv.types",
    "WSStateMessage": "openenv.types",
    "WSCloseMessage": "openenv.types",
    "WSObservationResponse": "openenv.types",
    "WSStateResponse": "openenv.types",
    "WSErrorResponse": "openenv.types",
    "ConcurrencyConfig": "openenv.types",
    "ServerCapacityStatus": "openenv.types",
    "SessionInfo": "openenv.types",
    "OpenEnvError": "openenv.errors",
    "ConcurrencyConfigurationError": "openenv.errors",
    "SessionCapacityError": "openenv.errors",
    "SessionNotFoundError": "openenv.errors",
    "SessionCreationError": "openenv.errors",
    "EnvironmentFactoryError": "openenv.errors",
    "CompositeTransform": "openenv.env.transforms",
    "NullTransform": "openenv.env.transforms",
    "HTTPEnvServer": "openenv.server.compat",
    "create_app": "openenv.server.app",
    "create_fastapi_app": "openenv.server.app",
    "deserialize_action": "openenv.protocol.schema",
    "deserialize_action_with_preprocessing": "openenv.protocol.schema",
    "serialize_observation": "openenv.protocol.codec",
    "GetEndpointConfig": "openenv.server.routes",
    "Tool": "openenv.tool_types",
    "ToolError": "openenv.tool_types",
    "ToolErrorType": "openenv.tool_types",
    "ListToolsAction": "openenv.tool_types",
    "CallToolAction": "openenv.tool_types",
    "ListToolsObservation": "openenv.tool_types",
    "CallToolObservation": "openenv.tool_types",
    "RESERVED_TOOL_NAMES": "openenv.tool_types",
    "WSMCPMessage": "openenv.protocol.jsonrpc",
    "WSMCPResponse": "openenv.protocol.jsonrpc",
    "JsonRpcErrorCode": "openenv.protocol.jsonrpc",
    "JsonRpcError": "openenv.protocol.jsonrpc",
    "JsonRpcRequest": "openenv.protocol.jsonrpc",
    "JsonRpcResponse": "openenv.protocol.jsonrpc",
    "McpMethod": "openenv.protocol.jsonrpc",
}
# Their modules say what is missing; they join the table above when they land.
_LATER = {
    "MCPEnvironment": "openenv.core.env_server.mcp_environment",
    "WebInterfaceManager": "openenv.core.env_server.web_interface",
    "create_web_interface_app": "openenv.core.env_server.web_interface",
}
_SUBMODULES = {
    name: f"{__name__}.{name}:"
    for name in (
        "base_transforms",
        "exceptions",
        "http_server",
        "interfaces",
        "mcp_environment",
        "mcp_types",
        "route_config",
        "serialization",
        "types",
        "web_interface",
    )
}

__getattr__, __dir__, _names = lazy_exports(__name__, {**_EXPORTS, **_LATER, **_SUBMODULES})
__all__ = list(_EXPORTS)
