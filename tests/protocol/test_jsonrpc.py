"""The JSON-RPC envelope: exactly one of result and error, ids echoed, unknown keys refused."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from openenv.protocol.jsonrpc import (
    JsonRpcError,
    JsonRpcErrorCode,
    JsonRpcRequest,
    JsonRpcResponse,
    WSMCPMessage,
    WSMCPResponse,
)


def test_a_request_needs_version_and_method_and_allows_nothing_unknown() -> None:
    request = JsonRpcRequest.model_validate({"jsonrpc": "2.0", "method": "tools/list"})
    assert (request.params, request.id) == ({}, None)
    for bad in (
        {"method": "x"},
        {"jsonrpc": "1.0", "method": "x"},
        {"jsonrpc": "2.0"},
        {"jsonrpc": "2.0", "method": "x", "extra": 1},
    ):
        with pytest.raises(ValidationError):
            JsonRpcRequest.model_validate(bad)


@pytest.mark.parametrize("request_id", ["a", 7, None])
def test_a_success_has_a_result_and_no_error(request_id: str | int | None) -> None:
    dumped = JsonRpcResponse.success({"x": 1}, request_id).model_dump()
    assert dumped == {"jsonrpc": "2.0", "id": request_id, "result": {"x": 1}}


def test_a_null_result_is_still_a_result() -> None:
    assert json.loads(JsonRpcResponse.success(None, 1).model_dump_json()) == {"jsonrpc": "2.0", "id": 1, "result": None}


def test_a_failure_has_an_error_with_code_message_and_data() -> None:
    dumped = JsonRpcResponse.error_response(JsonRpcErrorCode.INVALID_PARAMS, data={"why": 1}, request_id=3).model_dump()
    assert dumped["error"] == {"code": -32602, "message": "Invalid params", "data": {"why": 1}}
    assert "result" not in dumped


@pytest.mark.parametrize("code", list(JsonRpcErrorCode))
def test_every_code_has_a_standard_message_that_can_be_replaced(code: JsonRpcErrorCode) -> None:
    assert JsonRpcError.from_code(code).message not in ("", "Unknown error")
    assert JsonRpcError.from_code(code, "own").message == "own"


def test_a_model_as_result_is_dumped() -> None:
    inner = WSMCPResponse(data={"a": 1})
    assert JsonRpcResponse.success(inner, 1).model_dump()["result"] == {"type": "mcp", "data": {"a": 1}}


def test_mcp_frames_carry_an_object() -> None:
    assert WSMCPMessage(data={"a": 1}).type == "mcp"
    with pytest.raises(ValidationError):
        WSMCPMessage.model_validate({"type": "mcp", "data": []})
