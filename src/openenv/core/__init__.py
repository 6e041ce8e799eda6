"""Facade: servers, clients and models on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_CLIENTS = by_module(
    {
        "openenv.client.env_client": "EnvClient SyncEnvClient GenericEnvClient GenericAction",
        "openenv.client.http_client": "HTTPEnvClient",
        "openenv.client.mcp_client": "MCPClientBase MCPToolClient",
        "openenv.llm.client": "AnthropicClient LLMClient LLMResponse OpenAIClient ToolCall create_llm_client",
    }
)
_SUBMODULES = {
    name: f"{__name__}.{name}:"
    for name in ("client_types", "containers", "env_client", "env_server", "rubrics", "tools", "utils")
}

if TYPE_CHECKING:  # the tables, for type checkers; tests/test_typing.py holds the two together
    from openenv.client.env_client import EnvClient as EnvClient
    from openenv.client.env_client import GenericAction as GenericAction
    from openenv.client.env_client import GenericEnvClient as GenericEnvClient
    from openenv.client.env_client import SyncEnvClient as SyncEnvClient
    from openenv.client.http_client import HTTPEnvClient as HTTPEnvClient
    from openenv.client.mcp_client import MCPClientBase as MCPClientBase
    from openenv.client.mcp_client import MCPToolClient as MCPToolClient
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
    from openenv.llm.client import AnthropicClient as AnthropicClient
    from openenv.llm.client import LLMClient as LLMClient
    from openenv.llm.client import LLMResponse as LLMResponse
    from openenv.llm.client import OpenAIClient as OpenAIClient
    from openenv.llm.client import ToolCall as ToolCall
    from openenv.llm.client import create_llm_client as create_llm_client
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

    from . import client_types as client_types
    from . import containers as containers
    from . import env_client as env_client
    from . import env_server as env_server
    from . import rubrics as rubrics
    from . import tools as tools
    from . import utils as utils

    __all__: list[str]
else:
    from .env_server import __all__ as _server_names

    _SERVER = dict.fromkeys(_server_names, "openenv.core.env_server")
    __getattr__, __dir__, _names = lazy_exports(__name__, {**_CLIENTS, **_SERVER, **_SUBMODULES})
    __all__ = [*_CLIENTS, *_SERVER]
