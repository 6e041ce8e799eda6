"""`SessionMCPBridge`: a session's tools as JSON-RPC requests and answers.

Knows messages as dictionaries; must not know how they travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openenv.protocol.jsonrpc import JsonRpcErrorCode
from openenv.tool_types import RESERVED_TOOL_NAMES

from .interface import ResourceSession, plain


class SessionMCPBridge:
    """Answers an agent's `tools/list` and `tools/call` requests from a session.

    Args:
        session: Where the tools are.
    """

    def __init__(self, session: ResourceSession) -> None:
        self._session = session

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a JSON-RPC request; what goes wrong is in the answer."""
        number = request.get("id")
        if request.get("jsonrpc") != "2.0" or not isinstance(request.get("method"), str):
            return _refusal(number, JsonRpcErrorCode.INVALID_REQUEST, "Invalid Request")
        given = request.get("params")
        params = given if isinstance(given, Mapping) else {}
        if request["method"] == "tools/list":
            tools = [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
                for tool in self._session.list_tools()
            ]
            return {"jsonrpc": "2.0", "id": number, "result": {"tools": tools}}
        if request["method"] == "tools/call":
            return self._call(number, params.get("name"), params.get("arguments"))
        return _refusal(number, JsonRpcErrorCode.METHOD_NOT_FOUND, f"Method not found: {request['method']}")

    def _call(self, number: Any, name: Any, arguments: Any) -> dict[str, Any]:
        if not isinstance(name, str) or not name:
            return _refusal(number, JsonRpcErrorCode.INVALID_PARAMS, "Missing tool name")
        if name in RESERVED_TOOL_NAMES:
            return _refusal(number, JsonRpcErrorCode.INVALID_PARAMS, f"Tool name '{name}' is reserved")
        if arguments is not None and not isinstance(arguments, Mapping):
            return _refusal(number, JsonRpcErrorCode.INVALID_PARAMS, "Tool arguments must be an object")
        try:
            result = self._session.call_tool(name, dict(arguments or {}))
            shown = plain(result)
        except Exception as exc:  # the request boundary: an agent reads what went wrong
            text = str(exc.args[0]) if isinstance(exc, KeyError) and exc.args else str(exc)
            return _refusal(number, JsonRpcErrorCode.INTERNAL_ERROR, text or type(exc).__name__)
        return {"jsonrpc": "2.0", "id": number, "result": shown}


def _refusal(number: Any, code: JsonRpcErrorCode, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": int(code), "message": message, "data": None}}
