"""JSON-RPC 2.0 as OpenEnv speaks it: requests, responses, error codes, and the `mcp` frames that carry them.

Knows the envelope only; what a method does is the server's business.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from typing_extensions import Self

from ..types import BaseMessage


class JsonRpcErrorCode(int, Enum):
    """The codes in use."""

    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL_ERROR = -32603
    SERVER_ERROR = -32000


def code_name(code: int) -> str:
    """Name a code, for whoever counts errors."""
    try:
        return JsonRpcErrorCode(code).name
    except ValueError:
        return f"JSONRPC_{code}"


_DEFAULT_MESSAGES = {
    JsonRpcErrorCode.PARSE_ERROR: "Parse error",
    JsonRpcErrorCode.INVALID_REQUEST: "Invalid Request",
    JsonRpcErrorCode.METHOD_NOT_FOUND: "Method not found",
    JsonRpcErrorCode.INVALID_PARAMS: "Invalid params",
    JsonRpcErrorCode.INTERNAL_ERROR: "Internal error",
    JsonRpcErrorCode.SERVER_ERROR: "Server error",
}


class McpMethod(str, Enum):
    """The tool methods."""

    TOOLS_LIST = "tools/list"
    TOOLS_CALL = "tools/call"


class JsonRpcError(BaseModel):
    """The error of a response."""

    model_config = ConfigDict(extra="forbid")

    code: int
    message: str
    data: Any = None

    @classmethod
    def from_code(cls, code: JsonRpcErrorCode, message: str | None = None, data: Any = None) -> Self:
        """Build from a known code, by default with its standard message."""
        return cls(code=code.value, message=message or _DEFAULT_MESSAGES.get(code, "Unknown error"), data=data)


class JsonRpcRequest(BaseModel):
    """A request; without an id it is a notification."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


class JsonRpcResponse(BaseModel):
    """A response: a result or an error, never both; the id is always there."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"] = "2.0"
    result: Any = None
    error: JsonRpcError | None = None
    id: str | int | None = None

    @classmethod
    def success(cls, result: Any, request_id: str | int | None = None) -> Self:
        """Answer with a result, which may be null."""
        return cls(result=result, id=request_id)

    @classmethod
    def error_response(
        cls,
        code: JsonRpcErrorCode,
        message: str | None = None,
        data: Any = None,
        request_id: str | int | None = None,
    ) -> Self:
        """Answer with an error."""
        return cls(error=JsonRpcError.from_code(code, message, data), id=request_id)

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        """Dump with exactly one of `result` and `error`."""
        data: dict[str, Any] = {"jsonrpc": self.jsonrpc, "id": self.id}
        if self.error is not None:
            data["error"] = self.error.model_dump(**kwargs)
        else:
            result = self.result
            data["result"] = result.model_dump(**kwargs) if isinstance(result, BaseModel) else result
        return data

    def model_dump_json(self, **kwargs: Any) -> str:
        """Dump as text with exactly one of `result` and `error`."""
        return to_json(self.model_dump(mode="json"), **kwargs).decode()


class WSMCPMessage(BaseMessage):
    """Client frame that carries a JSON-RPC request."""

    type: Literal["mcp"] = "mcp"
    data: dict[str, Any]


class WSMCPResponse(BaseModel):
    """Server frame that carries a JSON-RPC response."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["mcp"] = "mcp"
    data: dict[str, Any]
