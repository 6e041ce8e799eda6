"""Models and errors as existing code relies on them: fields, defaults, limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import http_calls
from openenv import create_app
from openenv.core.env_server import exceptions, mcp_types, types
from openenv.core.env_server.interfaces import Environment
from servers import Serve

REQUIRED = object()


# -- models ---------------------------------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "Action": {"metadata": {}},
    "Observation": {"done": False, "reward": None, "metadata": {}},
    "State": {"episode_id": None, "step_count": 0},
    "ResetRequest": {"seed": None, "episode_id": None},
    "StepRequest": {"action": REQUIRED, "timeout_s": None, "request_id": None},
    "ResetResponse": {"observation": REQUIRED, "reward": None, "done": False, "metadata": None},
    "StepResponse": {"observation": REQUIRED, "reward": None, "done": False, "metadata": None},
    "CodeExecResult": {"stdout": REQUIRED, "stderr": REQUIRED, "exit_code": REQUIRED},
    "EnvironmentMetadata": {
        "name": REQUIRED,
        "description": REQUIRED,
        "readme_content": None,
        "version": None,
        "author": None,
        "documentation_url": None,
    },
    "SchemaResponse": {"action": REQUIRED, "observation": REQUIRED, "state": REQUIRED, "reset_observation": None},
    "HealthResponse": {"status": types.HealthStatus.HEALTHY},
    "ListTasksRequest": {"split": REQUIRED},
    "NumTasksRequest": {"split": REQUIRED},
    "GetTaskRequest": {"split": REQUIRED, "index": REQUIRED},
    "GetTaskRangeRequest": {"split": REQUIRED, "start": None, "stop": None},
    "WSResetMessage": {"type": "reset", "data": {}},
    "WSStepMessage": {"type": "step", "data": REQUIRED},
    "WSStateMessage": {"type": "state"},
    "WSCloseMessage": {"type": "close"},
    "WSObservationResponse": {"type": "observation", "data": REQUIRED},
    "WSStateResponse": {"type": "state", "data": REQUIRED},
    "WSErrorResponse": {"type": "error", "data": REQUIRED},
    "ConcurrencyConfig": {"max_concurrent_envs": 1, "session_timeout": None},
    "ServerCapacityStatus": {"active_sessions": REQUIRED, "max_sessions": REQUIRED},
    "SessionInfo": {
        "session_id": REQUIRED,
        "created_at": REQUIRED,
        "last_activity_at": REQUIRED,
        "step_count": 0,
        "environment_type": REQUIRED,
    },
    "JsonRpcError": {"code": REQUIRED, "message": REQUIRED, "data": None},
    "JsonRpcRequest": {"jsonrpc": REQUIRED, "method": REQUIRED, "params": {}, "id": None},
    "JsonRpcResponse": {"jsonrpc": "2.0", "result": None, "error": None, "id": None},
    "Tool": {"name": REQUIRED, "description": REQUIRED, "input_schema": REQUIRED},
    "ToolError": {"error_type": REQUIRED, "message": REQUIRED},
    "ListToolsAction": {"metadata": {}, "type": "list_tools"},
    "CallToolAction": {"metadata": {}, "type": "call_tool", "tool_name": REQUIRED, "arguments": {}},
    "ListToolsObservation": {"done": False, "reward": None, "metadata": {}, "tools": REQUIRED},
    "CallToolObservation": {
        "done": False,
        "reward": None,
        "metadata": {},
        "tool_name": REQUIRED,
        "result": None,
        "error": None,
    },
    "WSMCPMessage": {"type": "mcp", "data": REQUIRED},
    "WSMCPResponse": {"type": "mcp", "data": REQUIRED},
}
OPEN = {"State", "ResetRequest", "StepRequest"}
OWN = {"terminated", "truncated", "prompt_template"}  # beyond the published fields; off the wire while unset


def model(name: str) -> type[BaseModel]:
    """Find a model by its name."""
    cls: type[BaseModel] = getattr(types, name, None) or getattr(mcp_types, name)
    return cls


@pytest.mark.parametrize("name", FIELDS)
def test_a_model_has_its_fields_with_their_defaults(name: str) -> None:
    fields = {key: field for key, field in model(name).model_fields.items() if key not in OWN}
    defaults = {
        key: REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        for key, field in fields.items()
    }
    assert defaults == FIELDS[name]


def test_the_schema_of_an_observation_has_our_own_fields_only_if_its_class_declares_them() -> None:
    class Plain(types.Observation):
        text: str = ""

    class Declared(Plain):
        truncated: bool = False

    class Nested(types.Observation):
        first: Plain
        second: Declared

    def fields(schema: Any) -> set[str]:
        return set(schema["properties"]) - {"done", "reward", "metadata"}

    assert Plain(terminated=True).model_dump()["terminated"] is True
    assert fields(types.Observation.model_json_schema()) == set()
    assert fields(Plain.model_json_schema(mode="serialization")) == {"text"}
    assert fields(Declared.model_json_schema()) == {"text", "truncated"}
    inner = Nested.model_json_schema()["$defs"]
    assert (fields(inner["Plain"]), fields(inner["Declared"])) == ({"text"}, {"text", "truncated"})


@pytest.mark.parametrize("declares", [False, True])
def test_a_served_schema_has_our_own_fields_only_if_the_observation_declares_them(serve: Serve, declares: bool) -> None:
    class Plain(types.Observation):
        text: str = ""

    class Declared(Plain):
        terminated: bool = False
        truncated: bool = False

    class Room(Environment):
        def reset(self, seed: Any = None, episode_id: Any = None, **kwargs: Any) -> types.Observation:
            return Plain()

        def step(self, action: Any, timeout_s: Any = None, **kwargs: Any) -> types.Observation:
            return Plain()

    url = serve(create_app(Room, types.Action, Declared if declares else Plain)).url
    properties = http_calls.get(url + "/schema", trust_env=False).json()["observation"]["properties"]
    own = {"terminated", "truncated"} if declares else set()
    assert set(properties) == {"text", "done", "reward", "metadata"} | own


@pytest.mark.parametrize("name", FIELDS)
def test_a_model_forbids_unknown_keys_unless_it_is_meant_to_take_them(name: str) -> None:
    assert model(name).model_config.get("extra") == ("allow" if name in OPEN else "forbid")


@pytest.mark.parametrize("name", ["Action", "Observation", "State"])
def test_what_environments_subclass_checks_assignments_and_takes_any_type(name: str) -> None:
    config = model(name).model_config
    assert config.get("validate_assignment") is True
    assert config.get("arbitrary_types_allowed") is True


def test_base_messages_check_assignments() -> None:
    config = types.ConcurrencyConfig()
    with pytest.raises(ValidationError):
        config.max_concurrent_envs = 0
    assert issubclass(types.WSStepMessage, types.BaseMessage)
    assert issubclass(mcp_types.WSMCPMessage, types.BaseMessage)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Action", {"unknown": 1}),
        ("Observation", {"unknown": 1}),
        ("Observation", {"reward": "much"}),
        ("State", {"step_count": -1}),
        ("ResetRequest", {"seed": -1}),
        ("ResetRequest", {"episode_id": "x" * 256}),
        ("StepRequest", {}),
        ("StepRequest", {"action": 1}),
        ("StepRequest", {"action": {}, "timeout_s": 0}),
        ("StepRequest", {"action": {}, "request_id": "x" * 256}),
        ("WSStepMessage", {}),
        ("WSStepMessage", {"data": {}, "timeout_s": 1}),
        ("WSStateMessage", {"type": "reset"}),
        ("ConcurrencyConfig", {"max_concurrent_envs": 0}),
        ("ConcurrencyConfig", {"session_timeout": 0}),
        ("ServerCapacityStatus", {"active_sessions": 2, "max_sessions": 1}),
        ("ServerCapacityStatus", {"active_sessions": -1, "max_sessions": 1}),
        ("ServerCapacityStatus", {"active_sessions": 0, "max_sessions": 0}),
        ("JsonRpcRequest", {"method": "x"}),
        ("JsonRpcRequest", {"jsonrpc": "1.0", "method": "x"}),
        ("Tool", {"name": "x", "input_schema": {}}),
        ("Tool", {"name": "x", "description": None, "input_schema": {}}),
        ("ToolError", {"error_type": "odd", "message": ""}),
        ("CallToolAction", {}),
    ],
)
def test_a_model_refuses(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(name)(**values)


def test_open_models_keep_what_they_do_not_know() -> None:
    assert types.State(board=[1, 2]).model_dump() == {"episode_id": None, "step_count": 0, "board": [1, 2]}
    assert types.ResetRequest(task="t").model_dump(exclude_unset=True) == {"task": "t"}
    assert types.StepRequest(action={}, more=1).model_extra == {"more": 1}
    assert types.ResetRequest(episode_id="x" * 255).episode_id == "x" * 255


@pytest.mark.parametrize("reward", [True, 3, 0.5, None])
def test_an_observation_keeps_the_kind_of_its_reward(reward: Any) -> None:
    assert types.Observation(reward=reward).reward is reward


def test_an_observation_dumps_to_the_published_keys_while_nothing_else_is_set() -> None:
    assert set(types.Observation().model_dump()) == {"done", "reward", "metadata"}
    assert json.loads(types.Observation(metadata={"a": 1}).model_dump_json()) == {
        "done": False,
        "reward": None,
        "metadata": {"a": 1},
    }


def test_a_schema_response_without_a_reset_schema_does_not_mention_it() -> None:
    plain = types.SchemaResponse(action={}, observation={}, state={})
    assert plain.model_dump() == {"action": {}, "observation": {}, "state": {}}
    full = types.SchemaResponse(action={}, observation={}, state={}, reset_observation={"a": 1})
    assert full.model_dump()["reset_observation"] == {"a": 1}


def test_a_capacity_status_counts() -> None:
    status = types.ServerCapacityStatus.from_counts(2, 5)
    assert (status.active_sessions, status.max_sessions, status.available_slots) == (2, 5, 3)
    assert not status.is_at_capacity
    assert types.ServerCapacityStatus.from_counts(active=5, max_sessions=5).is_at_capacity


def test_incoming_messages_are_distinguished_by_their_type() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(types.WSIncomingMessage)
    assert isinstance(adapter.validate_python({"type": "reset"}), types.WSResetMessage)
    assert isinstance(adapter.validate_python({"type": "step", "data": {}}), types.WSStepMessage)
    assert isinstance(adapter.validate_python({"type": "state"}), types.WSStateMessage)
    assert isinstance(adapter.validate_python({"type": "close"}), types.WSCloseMessage)
    with pytest.raises(ValidationError):
        adapter.validate_python({"type": "mcp", "data": {}})


def test_enums_have_their_values() -> None:
    assert [mode.value for mode in types.ServerMode] == ["simulation", "production"]
    assert {status.value for status in types.HealthStatus} == {"healthy", "unhealthy", "degraded"}
    codes = "INVALID_JSON UNKNOWN_TYPE VALIDATION_ERROR EXECUTION_ERROR CAPACITY_REACHED FACTORY_ERROR SESSION_ERROR"
    assert {code.value for code in types.WSErrorCode} == set(codes.split())
    assert types.ServerMode("simulation") == "simulation"
    with pytest.raises(ValueError):
        types.ServerMode("SIMULATION")
    assert {kind.value for kind in mcp_types.ToolErrorType} == {
        "execution_error",
        "invalid_args",
        "transport_error",
        "tool_not_found",
        "timeout",
    }
    assert {method.name: method.value for method in mcp_types.McpMethod} == {
        "TOOLS_LIST": "tools/list",
        "TOOLS_CALL": "tools/call",
    }
    assert frozenset({"reset", "step", "state", "close"}) == mcp_types.RESERVED_TOOL_NAMES


# -- JSON-RPC -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("PARSE_ERROR", -32700, "Parse error"),
        ("INVALID_REQUEST", -32600, "Invalid Request"),
        ("METHOD_NOT_FOUND", -32601, "Method not found"),
        ("INVALID_PARAMS", -32602, "Invalid params"),
        ("INTERNAL_ERROR", -32603, "Internal error"),
        ("SERVER_ERROR", -32000, "Server error"),
    ],
)
def test_a_json_rpc_code_has_its_number_and_message(name: str, code: int, message: str) -> None:
    member = mcp_types.JsonRpcErrorCode[name]
    assert member.value == code
    assert mcp_types.JsonRpcError.from_code(member).model_dump() == {"code": code, "message": message, "data": None}
    own = mcp_types.JsonRpcError.from_code(member, "mine", {"a": 1})
    assert (own.message, own.data) == ("mine", {"a": 1})


def test_a_json_rpc_response_dumps_a_result_or_an_error_and_always_its_id() -> None:
    success = mcp_types.JsonRpcResponse.success({"tools": []}, request_id=3)
    assert success.model_dump() == {"jsonrpc": "2.0", "id": 3, "result": {"tools": []}}
    assert mcp_types.JsonRpcResponse.success(None).model_dump() == {"jsonrpc": "2.0", "id": None, "result": None}
    failure = mcp_types.JsonRpcResponse.error_response(mcp_types.JsonRpcErrorCode.INVALID_PARAMS, request_id="a")
    expected = {
        "jsonrpc": "2.0",
        "id": "a",
        "error": {"code": -32602, "message": "Invalid params", "data": None},
    }
    assert failure.model_dump() == expected
    assert json.loads(failure.model_dump_json()) == expected
    assert json.loads(success.model_dump_json()) == success.model_dump()
    assert failure.model_dump(mode="json") == expected


# -- exceptions -----------------------------------------------------------------------------------------------------


def test_exceptions_keep_what_they_were_made_of() -> None:
    configuration = exceptions.ConcurrencyConfigurationError("Env", 4)
    assert (configuration.environment_name, configuration.max_concurrent_envs) == ("Env", 4)
    assert "Env" in str(configuration)
    assert "SUPPORTS_CONCURRENT_SESSIONS" in str(configuration)
    capacity = exceptions.SessionCapacityError(2, 2)
    assert (capacity.active_sessions, capacity.max_sessions) == (2, 2)
    assert str(capacity) == "Server at capacity: 2/2 sessions active. Cannot accept new connections."
    assert exceptions.SessionNotFoundError("abc").session_id == "abc"
    assert "abc" in str(exceptions.SessionNotFoundError("abc"))
    assert exceptions.SessionCreationError("no room").reason == "no room"
    assert "no room" in str(exceptions.SessionCreationError("no room"))
    factory = exceptions.EnvironmentFactoryError("make")
    assert factory.factory_name == "make"
    assert str(factory) == "Environment factory 'make' failed to create instance."


def test_exceptions_take_a_message_of_their_own_and_share_a_base() -> None:
    assert str(exceptions.ConcurrencyConfigurationError("Env", 4, "mine")) == "mine"
    assert str(exceptions.SessionCapacityError(1, 1, "mine")) == "mine"
    assert str(exceptions.SessionCapacityError(active_sessions=1, max_sessions=1, message="mine")) == "mine"
    for name in exceptions.__all__:
        assert issubclass(getattr(exceptions, name), exceptions.OpenEnvError)
