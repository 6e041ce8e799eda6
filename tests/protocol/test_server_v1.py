"""The server's side of v1: frames to requests, and every way a frame can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError, field_validator

from openenv.errors import EnvironmentFactoryError, SessionCapacityError
from openenv.protocol.server_v1 import (
    Malformed,
    ServerProtocol,
    V1Request,
    error_frame,
    error_list,
    exception_frame,
    observation_frame,
    rpc_frame,
    state_frame,
)
from openenv.types import Action, Observation, State, WSErrorCode


class Say(Action):
    message: str

    @field_validator("message")
    @classmethod
    def _polite(cls, value: str) -> str:
        if value == "rude":
            raise ValueError("be polite")
        if value == "crash":
            raise RuntimeError("the validator itself is broken")
        return value


PROTOCOL = ServerProtocol(Say)


def refusal(request: V1Request | Malformed) -> dict[str, Any]:
    assert isinstance(request, Malformed)
    reply = json.loads(request.reply)
    assert reply["type"] == "error"
    data: dict[str, Any] = reply["data"]
    return data


def test_each_kind_of_frame_becomes_its_request() -> None:
    assert PROTOCOL.parse(b'{"type":"step","data":{"message":"hi"}}') == V1Request("step", Say(message="hi"))
    assert PROTOCOL.parse(b'{"type":"reset","data":{"seed":-5,"any":[1]}}') == V1Request(
        "reset", {"seed": -5, "any": [1]}
    )
    assert PROTOCOL.parse(b'{"type":"reset"}') == V1Request("reset", {})
    assert PROTOCOL.parse(b'{"type":"state"}') == V1Request("state")
    assert PROTOCOL.parse(b'{"type":"close"}') == V1Request("close")
    assert PROTOCOL.parse(b'{"type":"mcp","data":{"method":"x"}}') == V1Request("mcp", {"method": "x"})


@pytest.mark.parametrize(
    "raw",
    [
        b'{"data":{"message":"hi"},"type":"step"}',
        b' {\n "type" : "step",\n "data" : {"message": "hi", "metadata": {}}\n}',
        b'{"data":{"message":"hi","metadata":{"padding":"' + b"x" * 100 + b'"}},"type":"step"}',
    ],
)
def test_the_order_and_spacing_of_keys_do_not_matter(raw: bytes) -> None:
    request = PROTOCOL.parse(raw)
    assert isinstance(request, V1Request)
    assert request.data.message == "hi"


@pytest.mark.parametrize("raw", [b"", b"{", b"nonsense", b"\xff\xfe", b"[1,2]", b'"text"', b"7", b"null", b"true"])
def test_what_is_not_a_json_object_is_invalid_json(raw: bytes) -> None:
    data = refusal(PROTOCOL.parse(raw))
    assert data["code"] == "INVALID_JSON"
    assert data["message"].startswith("Invalid JSON:")


@pytest.mark.parametrize("kind", ['"fly"', "null", "7", '["step"]', '{"a":1}'])
def test_a_type_that_is_unknown_is_named(kind: str) -> None:
    data = refusal(PROTOCOL.parse(f'{{"type":{kind}}}'.encode()))
    assert data["code"] == "UNKNOWN_TYPE"
    assert data["message"].startswith("Unknown message type:")


def test_a_missing_type_is_unknown_and_an_endless_one_is_cut() -> None:
    assert refusal(PROTOCOL.parse(b"{}"))["code"] == "UNKNOWN_TYPE"
    assert len(refusal(PROTOCOL.parse(b'{"type":"' + b"x" * 10_000 + b'"}'))["message"]) < 200


@pytest.mark.parametrize(
    "raw",
    [
        b'{"type":"step"}',
        b'{"type":"step","data":{}}',
        b'{"type":"step","data":{"message":7}}',
        b'{"type":"step","data":{"message":"hi","unknown":1}}',
        b'{"type":"step","data":{"message":"hi"},"timeout_s":2}',
        b'{"type":"step","data":[]}',
        b'{"type":"reset","data":7}',
        b'{"type":"state","data":{}}',
        b'{"type":"close","now":true}',
        b'{"type":"mcp"}',
    ],
)
def test_a_frame_or_action_that_does_not_fit_is_a_validation_error(raw: bytes) -> None:
    data = refusal(PROTOCOL.parse(raw))
    assert data["code"] == "VALIDATION_ERROR"
    assert data["message"] == "Invalid message"
    assert data["errors"]
    assert "loc" in data["errors"][0]


def test_a_validator_that_raises_value_error_is_described() -> None:
    errors = refusal(PROTOCOL.parse(b'{"type":"step","data":{"message":"rude"}}'))["errors"]
    assert errors[0]["loc"] == ["message"]
    assert "be polite" in errors[0]["msg"]


def test_a_validator_that_breaks_is_described_too() -> None:
    errors = refusal(PROTOCOL.parse(b'{"type":"step","data":{"message":"crash"}}'))["errors"]
    assert "the validator itself is broken" in errors[0]["msg"]


def test_the_answer_to_a_large_bad_action_is_short() -> None:
    raw = b'{"type":"step","data":{"message":7,"metadata":{"x":"' + b"y" * 200_000 + b'"}}}'
    request = PROTOCOL.parse(raw)
    assert isinstance(request, Malformed)
    assert len(request.reply) < 2_000


def test_errors_whose_input_is_not_text_can_still_be_described() -> None:
    class Strange(Action):
        number: int

    with pytest.raises(ValidationError) as caught:
        Strange.model_validate({"number": b"\xff"})
    assert error_list(caught.value)[0]["loc"]


def test_without_an_action_class_a_step_is_a_dict() -> None:
    assert ServerProtocol(None).parse(b'{"type":"step","data":{"a":1}}') == V1Request("step", {"a": 1})


def test_replies_have_the_shapes_of_the_contract() -> None:
    observation = Observation(reward=1.0, done=True, metadata={"k": 1})
    assert json.loads(observation_frame(observation)) == {
        "type": "observation",
        "data": {"observation": {"metadata": {"k": 1}}, "reward": 1.0, "done": True, "metadata": {"k": 1}},
    }
    assert json.loads(state_frame(State(episode_id="e"))) == {
        "type": "state",
        "data": {"episode_id": "e", "step_count": 0},
    }
    assert json.loads(rpc_frame({"id": 1})) == {"type": "mcp", "data": {"id": 1}}
    assert json.loads(error_frame(WSErrorCode.SESSION_ERROR, "m", {"x": 1})) == {
        "type": "error",
        "data": {"message": "m", "code": "SESSION_ERROR", "x": 1},
    }


def test_exceptions_become_error_frames_with_their_code_and_details() -> None:
    capacity = json.loads(exception_frame(SessionCapacityError(2, 2)))["data"]
    assert (capacity["code"], capacity["active_sessions"], capacity["max_sessions"]) == ("CAPACITY_REACHED", 2, 2)
    factory = json.loads(exception_frame(EnvironmentFactoryError("make", reason="boom")))["data"]
    assert (factory["code"], factory["factory_name"], factory["reason"]) == ("FACTORY_ERROR", "make", "boom")


def test_any_other_exception_is_the_environments_failure() -> None:
    assert json.loads(exception_frame(ValueError("why")))["data"] == {"message": "why", "code": "EXECUTION_ERROR"}
    assert json.loads(exception_frame(KeyError()))["data"]["message"] == "KeyError"
