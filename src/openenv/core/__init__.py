"""Facade: servers, clients and models. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports, submodules

if TYPE_CHECKING:
    from openenv.client.env_client import EnvClient as EnvClient
    from openenv.client.env_client import GenericAction as GenericAction
    from openenv.client.env_client import GenericEnvClient as GenericEnvClient
    from openenv.client.env_client import SyncEnvClient as SyncEnvClient
    from openenv.client.http_client import HTTPEnvClient as HTTPEnvClient
    from openenv.client.llm_client import AnthropicClient as AnthropicClient
    from openenv.client.llm_client import LLMClient as LLMClient
    from openenv.client.llm_client import LLMResponse as LLMResponse
    from openenv.client.llm_client import OpenAIClient as OpenAIClient
    from openenv.client.llm_client import ToolCall as ToolCall
    from openenv.client.llm_client import create_llm_client as create_llm_client
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
    from openenv.protocol.tool_messages import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
    from openenv.protocol.tool_messages import CallToolAction as CallToolAction
    from openenv.protocol.tool_messages import CallToolObservation as CallToolObservation
    from openenv.protocol.tool_messages import ListToolsAction as ListToolsAction
    from openenv.protocol.tool_messages import ListToolsObservation as ListToolsObservation
    from openenv.protocol.tool_messages import Tool as Tool
    from openenv.protocol.tool_messages import ToolError as ToolError
    from openenv.protocol.tool_messages import ToolErrorType as ToolErrorType
    from openenv.server.app import HTTPEnvServer as HTTPEnvServer
    from openenv.server.app import create_app as create_app
    from openenv.server.app import create_fastapi_app as create_fastapi_app
    from openenv.server.routes import GetEndpointConfig as GetEndpointConfig
    from openenv.server.web.web_interface import WebInterfaceManager as WebInterfaceManager
    from openenv.server.web.web_page import create_web_interface_app as create_web_interface_app
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

    from . import client_types as client_types
    from . import containers as containers
    from . import env_client as env_client
    from . import env_server as env_server
    from . import rubrics as rubrics
    from . import tools as tools
    from . import utils as utils

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.client.env_client": "EnvClient GenericAction GenericEnvClient SyncEnvClient",
                "openenv.client.http_client": "HTTPEnvClient",
                "openenv.client.llm_client": """
                AnthropicClient LLMClient LLMResponse OpenAIClient ToolCall create_llm_client
            """,
                "openenv.client.mcp_client": "MCPClientBase MCPToolClient",
                "openenv.env.environment": """
                CompositeTransform Environment Message ModelTokenizer NullTransform TaskProvider
                Transform
            """,
                "openenv.env.mcp_environment": "MCPEnvironment",
                "openenv.errors": """
                ConcurrencyConfigurationError EnvironmentFactoryError OpenEnvError
                SessionCapacityError SessionCreationError SessionNotFoundError
            """,
                "openenv.protocol.json_values": "serialize_observation",
                "openenv.protocol.jsonrpc": """
                JsonRpcError JsonRpcErrorCode JsonRpcRequest JsonRpcResponse McpMethod WSMCPMessage
                WSMCPResponse
            """,
                "openenv.protocol.schema": "deserialize_action deserialize_action_with_preprocessing",
                "openenv.protocol.tool_messages": """
                CallToolAction CallToolObservation ListToolsAction ListToolsObservation
                RESERVED_TOOL_NAMES Tool ToolError ToolErrorType
            """,
                "openenv.server.app": "HTTPEnvServer create_app create_fastapi_app",
                "openenv.server.routes": "GetEndpointConfig",
                "openenv.server.web.web_interface": "WebInterfaceManager",
                "openenv.server.web.web_page": "create_web_interface_app",
                "openenv.types": """
                Action BaseMessage ConcurrencyConfig GetTaskRangeRequest GetTaskRequest
                HealthResponse HealthStatus ListTasksRequest NumTasksRequest Observation
                SchemaResponse ServerCapacityStatus ServerMode SessionInfo State WSCloseMessage
                WSErrorCode WSErrorResponse WSIncomingMessage WSObservationResponse WSResetMessage
                WSStateMessage WSStateResponse WSStepMessage
            """,
            }
        ),
        unlisted={**submodules(__name__, "client_types containers env_client env_server rubrics tools utils")},
    )
