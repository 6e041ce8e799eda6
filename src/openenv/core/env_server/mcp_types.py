"""Facade: tool and JSON-RPC models of `openenv.protocol`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.protocol.jsonrpc import JsonRpcError as JsonRpcError
from openenv.protocol.jsonrpc import JsonRpcErrorCode as JsonRpcErrorCode
from openenv.protocol.jsonrpc import JsonRpcRequest as JsonRpcRequest
from openenv.protocol.jsonrpc import JsonRpcResponse as JsonRpcResponse
from openenv.protocol.jsonrpc import McpMethod as McpMethod
from openenv.protocol.jsonrpc import WSMCPMessage as WSMCPMessage
from openenv.protocol.jsonrpc import WSMCPResponse as WSMCPResponse
from openenv.protocol.tool_messages import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
from openenv.protocol.tool_messages import CallToolAction as CallToolAction
from openenv.protocol.tool_messages import CallToolObservation as CallToolObservation
from openenv.protocol.tool_messages import ListToolsAction as ListToolsAction
from openenv.protocol.tool_messages import ListToolsObservation as ListToolsObservation
from openenv.protocol.tool_messages import Tool as Tool
from openenv.protocol.tool_messages import ToolError as ToolError
from openenv.protocol.tool_messages import ToolErrorType as ToolErrorType
from openenv.types import Action as Action
from openenv.types import BaseMessage as BaseMessage
from openenv.types import Observation as Observation

export_imports(__name__)
