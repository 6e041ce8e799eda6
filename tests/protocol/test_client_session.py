"""The client's side of v1: requests, replies, error codes to exceptions, and the memory of a lost episode."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from openenv.errors import (
    EnvironmentFactoryError,
    ExecutionError,
    InvalidMessageError,
    ProtocolError,
    RequestValidationError,
    ServerError,
    SessionCapacityError,
    SessionError,
    SessionLost,
    UnknownTypeError,
)
from openenv.protocol.client_sessions import ClientSession, error_from_frame


def test_requests_are_frames_of_the_contract() -> None:
    session = ClientSession()
    assert json.loads(session.request("reset", {"seed": 1})) == {"type": "reset", "data": {"seed": 1}}
    assert json.loads(session.request("step", {"m": "é"})) == {"type": "step", "data": {"m": "é"}}
    assert json.loads(session.request("state")) == {"type": "state"}


def test_arrays_and_bytes_in_an_action_are_encoded() -> None:
    raw = ClientSession().request("step", {"a": np.array([1, 2]), "b": b"\xff", "c": np.float32(0.5)})
    assert json.loads(raw)["data"] == {"a": [1, 2], "b": "_w==", "c": 0.5}


@pytest.mark.parametrize(("kind", "type_"), [("reset", "observation"), ("step", "observation"), ("state", "state")])
def test_a_reply_of_the_right_type_gives_its_data(kind: str, type_: str) -> None:
    assert ClientSession().reply(kind, json.dumps({"type": type_, "data": {"x": 1}})) == {"x": 1}


@pytest.mark.parametrize(
    "raw",
    [b"nonsense", b"[]", b"null", b'{"type":"observation"}', b'{"type":"observation","data":7}', b'{"data":{}}'],
)
def test_a_reply_that_is_no_frame_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        ClientSession().reply("step", raw)


def test_a_reply_to_another_kind_of_request_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="observation"):
        ClientSession().reply("step", b'{"type":"state","data":{}}')


def test_an_error_frame_is_raised() -> None:
    with pytest.raises(ExecutionError, match=r"Server error: boom \(code: EXECUTION_ERROR\)"):
        ClientSession().reply("step", b'{"type":"error","data":{"message":"boom","code":"EXECUTION_ERROR"}}')


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("INVALID_JSON", InvalidMessageError),
        ("UNKNOWN_TYPE", UnknownTypeError),
        ("VALIDATION_ERROR", RequestValidationError),
        ("EXECUTION_ERROR", ExecutionError),
        ("SESSION_ERROR", SessionError),
        ("CAPACITY_REACHED", SessionCapacityError),
        ("FACTORY_ERROR", EnvironmentFactoryError),
        ("SOMETHING_NEW", ServerError),
    ],
)
def test_each_code_has_its_exception_and_all_are_runtime_errors(code: str, expected: type[ServerError]) -> None:
    error = error_from_frame({"message": "m", "code": code})
    assert type(error) is expected
    assert isinstance(error, RuntimeError)
    assert str(error).startswith("Server error: m")
    assert str(error).endswith(f" (code: {code})")


@pytest.mark.parametrize("code", ["SESSION_LOST", "SESSION_NOT_FOUND", "SESSION_CLOSED"])
def test_every_way_of_saying_that_a_session_is_gone_is_a_lost_session(code: str) -> None:
    error = error_from_frame({"message": "m", "code": code, "reason": "expired"})
    assert isinstance(error, SessionLost)
    assert isinstance(error, ConnectionError)


def test_details_of_an_error_frame_are_kept() -> None:
    capacity = error_from_frame({"message": "m", "code": "CAPACITY_REACHED", "active_sessions": 3, "max_sessions": 4})
    assert isinstance(capacity, SessionCapacityError)
    assert (capacity.active_sessions, capacity.max_sessions) == (3, 4)
    factory = error_from_frame({"message": "m", "code": "FACTORY_ERROR", "factory_name": "f", "reason": "r"})
    assert isinstance(factory, EnvironmentFactoryError)
    assert (factory.factory_name, factory.reason) == ("f", "r")
    assert error_from_frame({"message": "m", "code": "VALIDATION_ERROR", "errors": [1]}).details == {"errors": [1]}


@pytest.mark.parametrize(
    "data", [{}, {"message": None, "code": None}, {"code": "CAPACITY_REACHED", "max_sessions": "x"}]
)
def test_a_poor_error_frame_is_still_an_error(data: dict[str, Any]) -> None:
    assert isinstance(error_from_frame(data), ServerError)


def test_a_lost_episode_stays_lost_until_reset() -> None:
    session = ClientSession()
    session.lose("timeout")
    session.lose("a later reason")
    for kind in ("step", "state"):
        with pytest.raises(SessionLost, match="timeout"):
            session.request(kind, {})
    session.request("reset", {})
    assert session.lost_reason == "timeout"  # a reset that is not answered has begun nothing
    session.reply("reset", b'{"type":"observation","data":{"observation":{},"reward":null,"done":false}}')
    assert session.lost_reason is None
    session.request("step", {})
