"""JSON-RPC requests that reach an environment without tools.

Knows the envelope and its error codes; tools are an environment's own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..protocol.codec import decode
from ..protocol.jsonrpc import JsonRpcErrorCode, JsonRpcRequest, JsonRpcResponse, McpMethod
from .asgi import BodyTooLarge, ClientGone, Receive, Scope, Send, read_body, respond_json


def answer_rpc(data: Any) -> Mapping[str, Any]:
    """Answer one request."""
    if not isinstance(data, dict):
        return JsonRpcResponse.error_response(JsonRpcErrorCode.PARSE_ERROR).model_dump()
    try:
        request = JsonRpcRequest.model_validate(data)
    except ValidationError as exc:
        text = f"Invalid Request: {exc.error_count()} problem(s)"
        return JsonRpcResponse.error_response(JsonRpcErrorCode.INVALID_REQUEST, text).model_dump()
    if request.method not in (McpMethod.TOOLS_LIST.value, McpMethod.TOOLS_CALL.value):
        code, text = JsonRpcErrorCode.METHOD_NOT_FOUND, f"Method not found: {request.method}"
    elif request.method == McpMethod.TOOLS_CALL.value and "name" not in request.params:
        code, text = JsonRpcErrorCode.INVALID_PARAMS, "Missing 'name' in params"
    else:
        code, text = JsonRpcErrorCode.INTERNAL_ERROR, "Environment does not support MCP"
    return JsonRpcResponse.error_response(code, text, request_id=request.id).model_dump()


class RpcEndpoint:
    """The ASGI handler of `POST /mcp`: always 200, errors inside."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            data = decode(await read_body(receive, self._max_bytes))
        except (ValueError, BodyTooLarge) as exc:
            problem = JsonRpcResponse.error_response(JsonRpcErrorCode.PARSE_ERROR, f"Parse error: {exc}")
            await respond_json(send, 200, problem.model_dump())
        except ClientGone:
            return
        else:
            await respond_json(send, 200, dict(answer_rpc(data)))
