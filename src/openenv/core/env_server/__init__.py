"""Facade: everything that serves an environment, on the module path that existing code imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    "MCPEnvironment": "openenv.env.mcp_environment",
    "CompositeTransform": "openenv.env.environment",
    "NullTransform": "openenv.env.environment",
    "HTTPEnvServer": "openenv.server.app",
    "create_app": "openenv.server.app",
    "create_fastapi_app": "openenv.server.app",
    "deserialize_action": "openenv.protocol.schema",
    "deserialize_action_with_preprocessing": "openenv.protocol.schema",
    "serialize_observation": "openenv.protocol.json_values",
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
    "WebInterfaceManager": "openenv.web.web_interface",
    "create_web_interface_app": "openenv.web.web_page",
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

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.env.environment import CompositeTransform as CompositeTransform
    from openenv.env.environment import Environment as Environment
    from openenv.env.environment import Message as Message
    from openenv.env.environment import ModelTokenizer as ModelTokenizer
    from openenv.env.environment import NullTransform as NullTransform
    from openenv.env.environment import TaskProvider as TaskProvider
    from openenv.env.environment import Transform as Transform
    from openenv.env.mcp_environment import MCPEnvironment as MCPEnvironment
    from openenv.errors import ConcurrencyConfigurationError as ConcurrencyConfigurationError
    from openenv.errors import EnvironmentFactoryError as EnvironmentFactoryError
    from openenv.errors import OpenEnvError as OpenEnvError
    from openenv.errors import SessionCapacityError as SessionCapacityError
    from openenv.errors import SessionCreationError as SessionCreationError
    from openenv.errors import SessionNotFoundError as SessionNotFoundError
    from openenv.protocol.json_values import serialize_observation as serialize_observation
    from openenv.protocol.jsonrpc import JsonRpcError as JsonRpcError
    from openenv.protocol.jsonrpc import JsonRpcErrorCode as JsonRpcErrorCode
    from openenv.protocol.jsonrpc import JsonRpcRequest as JsonRpcRequest
    from openenv.protocol.jsonrpc import JsonRpcResponse as JsonRpcResponse
    from openenv.protocol.jsonrpc import McpMethod as McpMethod
    from openenv.protocol.jsonrpc import WSMCPMessage as WSMCPMessage
    from openenv.protocol.jsonrpc import WSMCPResponse as WSMCPResponse
    from openenv.protocol.schema import deserialize_action as deserialize_action
    from openenv.protocol.schema import deserialize_action_with_preprocessing as deserialize_action_with_preprocessing
    from openenv.server.app import HTTPEnvServer as HTTPEnvServer
    from openenv.server.app import create_app as create_app
    from openenv.server.app import create_fastapi_app as create_fastapi_app
    from openenv.server.routes import GetEndpointConfig as GetEndpointConfig
    from openenv.tool_types import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
    from openenv.tool_types import CallToolAction as CallToolAction
    from openenv.tool_types import CallToolObservation as CallToolObservation
    from openenv.tool_types import ListToolsAction as ListToolsAction
    from openenv.tool_types import ListToolsObservation as ListToolsObservation
    from openenv.tool_types import Tool as Tool
    from openenv.tool_types import ToolError as ToolError
    from openenv.tool_types import ToolErrorType as ToolErrorType
    from openenv.types import Action as Action
    from openenv.types import BaseMessage as BaseMessage
    from openenv.types import ConcurrencyConfig as ConcurrencyConfig
    from openenv.types import GetTaskRangeRequest as GetTaskRangeRequest
    from openenv.types import GetTaskRequest as GetTaskRequest
    from openenv.types import HealthResponse as HealthResponse
    from openenv.types import HealthStatus as HealthStatus
    from openenv.types import ListTasksRequest as ListTasksRequest
    from openenv.types import NumTasksRequest as NumTasksRequest
    from openenv.types import Observation as Observation
    from openenv.types import SchemaResponse as SchemaResponse
    from openenv.types import ServerCapacityStatus as ServerCapacityStatus
    from openenv.types import ServerMode as ServerMode
    from openenv.types import SessionInfo as SessionInfo
    from openenv.types import State as State
    from openenv.types import WSCloseMessage as WSCloseMessage
    from openenv.types import WSErrorCode as WSErrorCode
    from openenv.types import WSErrorResponse as WSErrorResponse
    from openenv.types import WSIncomingMessage as WSIncomingMessage
    from openenv.types import WSObservationResponse as WSObservationResponse
    from openenv.types import WSResetMessage as WSResetMessage
    from openenv.types import WSStateMessage as WSStateMessage
    from openenv.types import WSStateResponse as WSStateResponse
    from openenv.types import WSStepMessage as WSStepMessage
    from openenv.web.web_interface import WebInterfaceManager as WebInterfaceManager
    from openenv.web.web_page import create_web_interface_app as create_web_interface_app

    from . import base_transforms as base_transforms
    from . import exceptions as exceptions
    from . import http_server as http_server
    from . import interfaces as interfaces
    from . import mcp_types as mcp_types
    from . import route_config as route_config
    from . import serialization as serialization
    from . import types as types
    from . import web_interface as web_interface

    __all__: list[str]
else:
    __getattr__, __dir__, _names = lazy_exports(__name__, {**_EXPORTS, **_SUBMODULES})
    __all__ = list(_EXPORTS)
