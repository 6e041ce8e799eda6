"""`WS /mcp`: OpenEnv's own JSON-RPC, one request per text frame, on the connection's own session.

Knows frames; what requests mean is in `own`, how a connection lives in `server.ws`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...protocol.json_values import decode, encode
from ...protocol.jsonrpc import JsonRpcErrorCode, JsonRpcResponse
from ...types import WSErrorCode
from ..ws_v1 import GymConnection, GymEndpoint


class RpcConnection(GymConnection):
    """A connection whose frames are JSON-RPC."""

    def _handle(self, payload: bytes) -> None:
        try:
            data = decode(payload)
        except ValueError as exc:
            self._service.manager.report_error(JsonRpcErrorCode.PARSE_ERROR.name, self._session)
            self._socket.send(_error(JsonRpcErrorCode.PARSE_ERROR, f"Parse error: {exc}"))
        else:
            self._submit_rpc(data)

    def _rpc_frame(self, message: Mapping[str, Any]) -> bytes:
        return encode(message)

    def _fail(self, code: WSErrorCode | str, message: str, details: dict[str, Any] | None = None) -> None:
        self._socket.send(_error(JsonRpcErrorCode.SERVER_ERROR, message, details or None))
        self._socket.close()

    def _too_large(self, size: int, limit: int) -> bytes:
        return _error(JsonRpcErrorCode.INVALID_REQUEST, f"A message of {size} bytes is over the limit of {limit} bytes")


class RpcEndpoint(GymEndpoint):
    """The ASGI endpoint of `WS /mcp`."""

    connection = RpcConnection
    restricted = RpcConnection  # whoever may come here may call tools


def _error(code: JsonRpcErrorCode, message: str, data: Any = None) -> bytes:
    return encode(JsonRpcResponse.error_response(code, message, data).model_dump())
