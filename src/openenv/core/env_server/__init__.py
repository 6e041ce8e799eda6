"""Facade: everything that serves an environment, on the module path that existing code imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports, submodules

_EXPORTS = by_module(
    {
        "openenv.env.environment": """
            Environment Transform TaskProvider Message ModelTokenizer CompositeTransform NullTransform
        """,
        "openenv.types": """
            Action Observation State SchemaResponse HealthResponse ListTasksRequest NumTasksRequest
            GetTaskRequest GetTaskRangeRequest HealthStatus ServerMode WSErrorCode BaseMessage
            WSIncomingMessage WSResetMessage WSStepMessage WSStateMessage WSCloseMessage
            WSObservationResponse WSStateResponse WSErrorResponse ConcurrencyConfig ServerCapacityStatus
            SessionInfo
        """,
        "openenv.errors": """
            OpenEnvError ConcurrencyConfigurationError SessionCapacityError SessionNotFoundError
            SessionCreationError EnvironmentFactoryError
        """,
        "openenv.env.mcp_environment": "MCPEnvironment",
        "openenv.server.app": "HTTPEnvServer create_app create_fastapi_app",
        "openenv.protocol.schema": "deserialize_action deserialize_action_with_preprocessing",
        "openenv.protocol.json_values": "serialize_observation",
        "openenv.server.routes": "GetEndpointConfig",
        "openenv.protocol.tool_messages": """
            Tool ToolError ToolErrorType ListToolsAction CallToolAction ListToolsObservation
            CallToolObservation RESERVED_TOOL_NAMES
        """,
        "openenv.protocol.jsonrpc": """
            WSMCPMessage WSMCPResponse JsonRpcErrorCode JsonRpcError JsonRpcRequest JsonRpcResponse
            McpMethod
        """,
        "openenv.server.web.web_interface": "WebInterfaceManager",
        "openenv.server.web.web_page": "create_web_interface_app",
    }
)
_SUBMODULES = submodules(
    __name__,
    """
        base_transforms exceptions http_server interfaces mcp_environment mcp_types route_config serialization types
        web_interface
    """,
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.env.mcp_environment import MCPEnvironment as MCPEnvironment
    from openenv.server.app import HTTPEnvServer as HTTPEnvServer
    from openenv.server.app import create_app as create_app
    from openenv.server.app import create_fastapi_app as create_fastapi_app
    from openenv.server.routes import GetEndpointConfig as GetEndpointConfig
    from openenv.server.web.web_interface import WebInterfaceManager as WebInterfaceManager
    from openenv.server.web.web_page import create_web_interface_app as create_web_interface_app
    from openenv.types import ConcurrencyConfig as ConcurrencyConfig
    from openenv.types import GetTaskRangeRequest as GetTaskRangeRequest
    from openenv.types import GetTaskRequest as GetTaskRequest
    from openenv.types import HealthResponse as HealthResponse
    from openenv.types import HealthStatus as HealthStatus
    from openenv.types import ListTasksRequest as ListTasksRequest
    from openenv.types import NumTasksRequest as NumTasksRequest
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

    from . import base_transforms as base_transforms
    from . import exceptions as exceptions
    from . import http_server as http_server
    from . import interfaces as interfaces
    from . import mcp_environment as mcp_environment
    from . import mcp_types as mcp_types
    from . import route_config as route_config
    from . import serialization as serialization
    from . import types as types
    from . import web_interface as web_interface

    # All that these four export is exported here; of the others only a part is.
    from .base_transforms import *  # noqa: F403 - see above
    from .exceptions import *  # noqa: F403 - see above
    from .interfaces import Environment as Environment
    from .interfaces import Message as Message
    from .interfaces import ModelTokenizer as ModelTokenizer
    from .interfaces import TaskProvider as TaskProvider
    from .mcp_types import *  # noqa: F403 - see above
    from .serialization import *  # noqa: F403 - see above
else:  # without a declaration of `__all__` above: it would hide the names from the star import of `openenv.core`
    __getattr__, __dir__, _names = lazy_exports(__name__, {**_EXPORTS, **_SUBMODULES})
    __all__ = list(_EXPORTS)
