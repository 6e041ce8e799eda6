"""Facade: tool and JSON-RPC models. Re-exports only, from `openenv.tool_types` and `openenv.protocol.jsonrpc`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.protocol.jsonrpc import JsonRpcError as JsonRpcError
from openenv.protocol.jsonrpc import JsonRpcErrorCode as JsonRpcErrorCode
from openenv.protocol.jsonrpc import JsonRpcRequest as JsonRpcRequest
from openenv.protocol.jsonrpc import JsonRpcResponse as JsonRpcResponse
from openenv.protocol.jsonrpc import McpMethod as McpMethod
from openenv.protocol.jsonrpc import WSMCPMessage as WSMCPMessage
from openenv.protocol.jsonrpc import WSMCPResponse as WSMCPResponse
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
from openenv.types import Observation as Observation

export_imports(__name__)
