"""OpenEnv's JSON-RPC 2.0, and MCP on top of it, sans IO: messages, error codes, versions, validation.

Knows shapes only; must not know sessions or HTTP servers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from typing_extensions import Self

from openenv.types import BaseMessage


class JsonRpcErrorCode(int, Enum):
    """The codes in use."""

    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL_ERROR = -32603
    SERVER_ERROR = -32000


def code_name(code: int) -> str:
    """Name a code, for error counters."""
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


# -- MCP --------------------------------------------------------------------------------------------------------
#
# Two eras share one endpoint. In the handshake era a client begins with `initialize` and has a session; since
# 2026-07-28 each request stands alone and carries version and capabilities itself.

HANDSHAKE_VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSIONS: Final = ("2026-07-28",)
SUPPORTED_VERSIONS: Final = (*reversed(MODERN_VERSIONS), *reversed(HANDSHAKE_VERSIONS))  # the newest first

HEADER_MISMATCH: Final = -32020
UNSUPPORTED_VERSION: Final = -32022
REQUEST_CANCELLED: Final = -32800

META_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
META_CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
META_SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"
META_LOG_LEVEL: Final = "io.modelcontextprotocol/logLevel"
META_SESSION: Final = "openenv/session"

LOG_LEVELS: Final = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
Era = Literal["handshake", "modern"]

_CACHED_LISTS = frozenset(
    {"server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read"}
)
_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_STATUS = {
    JsonRpcErrorCode.PARSE_ERROR.value: 400,
    JsonRpcErrorCode.INVALID_REQUEST.value: 400,
    JsonRpcErrorCode.INVALID_PARAMS.value: 400,
    JsonRpcErrorCode.METHOD_NOT_FOUND.value: 404,
    HEADER_MISMATCH: 400,
    UNSUPPORTED_VERSION: 400,
    -32021: 400,
}


class McpError(Exception):
    """A request that is answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        error: dict[str, Any] = {"code": self.code, "message": str(self)}
        if self.data is not None:
            error["data"] = self.data
        return error


def invalid_params(message: str, data: Any = None) -> McpError:
    """Refuse parameters."""
    return McpError(JsonRpcErrorCode.INVALID_PARAMS.value, message, data)


def invalid_request(message: str) -> McpError:
    """Refuse a request as a whole."""
    return McpError(JsonRpcErrorCode.INVALID_REQUEST.value, message)


def internal_error(message: str, data: Any = None) -> McpError:
    """Report a failure."""
    return McpError(JsonRpcErrorCode.INTERNAL_ERROR.value, message, data)


def method_not_found(method: str) -> McpError:
    """Refuse a method."""
    return McpError(JsonRpcErrorCode.METHOD_NOT_FOUND.value, f"Method not found: {method}")


@dataclass(frozen=True, slots=True)
class McpMessage:
    """One JSON-RPC message of a client: a request, a notification (no id), or a response (no method)."""

    method: str | None
    params: Mapping[str, Any]
    id: str | int | None

    @property
    def is_request(self) -> bool:
        """Whether an answer is expected."""
        return self.method is not None and self.id is not None

    @property
    def meta(self) -> Mapping[str, Any]:
        """The request's `_meta`."""
        meta = self.params.get("_meta")
        return meta if isinstance(meta, Mapping) else {}

    @property
    def progress_token(self) -> str | int | None:
        """What progress notifications have to name."""
        token = self.meta.get("progressToken")
        return token if isinstance(token, (str, int)) and not isinstance(token, bool) else None


def read_message(data: Any) -> McpMessage:
    """Read a decoded message.

    Raises:
        McpError: It is not JSON-RPC 2.0.
    """
    if not isinstance(data, dict) or data.get("jsonrpc") != "2.0":
        raise invalid_request("Invalid Request: expected one JSON-RPC 2.0 object")
    method, params, request_id = data.get("method"), data.get("params", {}), data.get("id")
    if method is None and ("result" in data or "error" in data):
        return McpMessage(None, {}, request_id if isinstance(request_id, (str, int)) else None)
    if not isinstance(method, str):
        raise invalid_request("Invalid Request: method must be a string")
    if "id" in data and (not isinstance(request_id, (str, int)) or isinstance(request_id, bool)):
        raise invalid_request("Invalid Request: id must be a string or an integer")
    if params is None:
        params = {}
    if not isinstance(params, dict):
        raise invalid_params("Invalid params: expected an object")
    return McpMessage(method, params, request_id)


def era_of(headers: Mapping[str, str], data: Any) -> Era | None:
    """Return the MCP era of a POST; None for OpenEnv's JSON-RPC methods, which are not MCP.

    Args:
        headers: The request's headers, names in lower case.
        data: The decoded body.
    """
    method = data.get("method") if isinstance(data, dict) else None
    version = headers.get("mcp-protocol-version")
    # MCP clients must accept event streams; OpenEnv's methods never ask for one.
    streams = "text/event-stream" in headers.get("accept", "") and method not in _OWN_METHODS
    if version is not None and version not in HANDSHAKE_VERSIONS:
        return "modern"
    if method == "initialize" and (streams or "protocolVersion" in _params(data)):
        return "handshake"
    if version is not None or "mcp-session-id" in headers:
        return "handshake"
    if META_VERSION in _params(data).get("_meta", {}):
        return "modern"
    return "handshake" if streams else None


_OWN_METHODS = frozenset({"openenv/session/create", "openenv/session/close"})


def _params(data: Any) -> Mapping[str, Any]:
    """The parameters of a decoded request, or none; their `_meta` is an object."""
    params = data.get("params") if isinstance(data, dict) else None
    if not isinstance(params, dict):
        return {}
    return params if isinstance(params.get("_meta", {}), dict) else {**params, "_meta": {}}


def check_modern(headers: Mapping[str, str], message: McpMessage) -> None:
    """Check the required fields of a request since 2026-07-28; on stdio `headers` is empty.

    Raises:
        McpError: Something is missing, or header and body disagree.
    """
    meta = message.meta
    if META_VERSION not in meta or not isinstance(meta.get(META_CAPABILITIES), Mapping):
        raise invalid_params(f"params._meta must have {META_VERSION} and {META_CAPABILITIES}")
    version = meta[META_VERSION]
    if headers:
        _check_header(headers, "mcp-protocol-version", version)
        _check_header(headers, "mcp-method", message.method)
        named = _NAMED.get(message.method or "")
        if named is not None and isinstance(message.params.get(named), str):
            _check_header(headers, "mcp-name", message.params[named])
    if not isinstance(version, str):
        raise invalid_params(f"{META_VERSION} must be a string")
    if version not in MODERN_VERSIONS:
        raise McpError(
            UNSUPPORTED_VERSION,
            f"Unsupported protocol version: {version}",
            {"supported": list(SUPPORTED_VERSIONS), "requested": version},
        )


def _check_header(headers: Mapping[str, str], name: str, wanted: Any) -> None:
    value = headers.get(name)
    if value is None:
        raise McpError(HEADER_MISMATCH, f"Header {name} is missing")
    if _decoded(value.strip()) != wanted:
        raise McpError(HEADER_MISMATCH, f"Header {name} does not match the body")


def _decoded(value: str) -> str:
    """Read a header value that may be written as `=?base64?...?=`."""
    if value.startswith("=?base64?") and value.endswith("?="):
        try:
            return base64.b64decode(value[9:-2], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise McpError(HEADER_MISMATCH, "A header is not valid base64") from None
    return value


def negotiated_version(params: Mapping[str, Any]) -> str:
    """Choose the version of a handshake: the client's, or the newest that has a handshake.

    Raises:
        McpError: The parameters name no version.
    """
    version = params.get("protocolVersion")
    if not isinstance(version, str):
        raise invalid_params("Missing 'protocolVersion' in params")
    return version if version in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1]


def modern_result(method: str, result: dict[str, Any], server_info: Mapping[str, Any]) -> dict[str, Any]:
    """Add what every result since 2026-07-28 has. Lists may be kept for no time: tools can change with the session."""
    meta = {META_SERVER_INFO: dict(server_info), **result.get("_meta", {})}
    complete = {"resultType": "complete", **result, "_meta": meta}
    if method in _CACHED_LISTS:
        complete.setdefault("ttlMs", 0)
        complete.setdefault("cacheScope", "private")
    return complete


def status_of(error: McpError) -> int:
    """Return the HTTP status that carries an error since 2026-07-28."""
    return _STATUS.get(error.code, 200)


def result_message(request_id: str | int | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request."""
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def error_message(request_id: str | int | None, error: McpError) -> dict[str, Any]:
    """Refuse a request."""
    return {"jsonrpc": "2.0", "id": request_id, "error": error.body()}


def notification(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Build a message that needs no answer."""
    return {"jsonrpc": "2.0", "method": method, "params": params}


def page(items: Sequence[dict[str, Any]], cursor: Any, size: int) -> tuple[Sequence[dict[str, Any]], str | None]:
    """Cut a list: the items from a cursor on, and the cursor of the next page.

    Raises:
        McpError: The cursor is not one of ours.
    """
    start = 0
    if cursor is not None:
        try:
            start = int(base64.b64decode(cursor, validate=True).decode()) if isinstance(cursor, str) else -1
        except (ValueError, binascii.Error):
            start = -1
        if not 0 < start < len(items):
            raise invalid_params("Invalid cursor")
    end = start + size
    following = base64.b64encode(str(end).encode()).decode() if end < len(items) else None
    return items[start:end], following
