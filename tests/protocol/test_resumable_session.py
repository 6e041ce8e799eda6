"""The client's side of v2, sans IO: ids, replies to their own requests only, and what a resume needs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openenv.errors import (
    ExecutionError,
    Forbidden,
    ProtocolError,
    RequestCancelled,
    SessionCapacityError,
    SessionLost,
    StaleRequest,
)
from openenv.protocol.client_sessions import CLOSE, ContinuedElsewhere, Event, ResumableSession, error_from_frame


def opened(session: ResumableSession, *, last_id: int = 0, token: str = "b1.s.t") -> dict[str, Any]:
    """Open a session and return the request that did it."""
    request: dict[str, Any] = json.loads(session.open_request())
    assert session.opened(message("opened", request["id"], session="s", token=token, last_id=last_id))
    return request


def message(kind: str, message_id: int | None, **content: Any) -> bytes:
    return json.dumps({"type": kind, "id": message_id, **content}).encode()


def observation(message_id: int | None, number: int = 0) -> bytes:
    return message("observation", message_id, data={"observation": {"n": number}, "reward": None, "done": False})


def error(message_id: int | None, code: str, **details: Any) -> bytes:
    return message("error", message_id, data={"message": "m", "code": code, **details})


@pytest.fixture
def session() -> ResumableSession:
    """A session that is open."""
    found = ResumableSession()
    opened(found)
    return found


# -- requests -----------------------------------------------------------------------------------------------------


def test_ids_increase_and_requests_are_messages_of_the_specification(session: ResumableSession) -> None:
    assert json.loads(session.request("reset", {"seed": 1})) == {"type": "reset", "id": 1, "data": {"seed": 1}}
    session.receive(observation(1))
    step = session.request("step", {"m": "é"}, {"timeout_s": 2.5, "kwargs": {"hint": True}})
    assert json.loads(step) == {
        "type": "step",
        "id": 2,
        "data": {"m": "é"},
        "timeout_s": 2.5,
        "kwargs": {"hint": True},
    }
    session.receive(observation(2))
    assert json.loads(session.request("state")) == {"type": "state", "id": 3}


def test_arrays_and_bytes_in_an_action_are_encoded(session: ResumableSession) -> None:
    raw = session.request("step", {"a": np.array([1, 2]), "b": b"\xff", "c": np.float32(0.5)})
    assert json.loads(raw)["data"] == {"a": [1, 2], "b": "_w==", "c": 0.5}


def test_an_action_that_cannot_be_encoded_takes_no_id(session: ResumableSession) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError):
        session.request("step", loop)
    assert not session.is_waiting
    assert json.loads(session.request("step", {}))["id"] == 1


def test_the_close_message_has_an_id_above_that_of_every_request(session: ResumableSession) -> None:
    close = json.loads(CLOSE)
    assert close["type"] == "close"
    assert close["id"] > 10**15
    assert json.loads(session.open_request())["id"] > close["id"]


# -- replies ------------------------------------------------------------------------------------------------------


def test_a_reply_gives_its_data_once(session: ResumableSession) -> None:
    session.request("reset")
    assert session.receive(observation(1, 7)) == {"observation": {"n": 7}, "reward": None, "done": False}
    assert session.receive(observation(1, 7)) is None


@pytest.mark.parametrize(
    "stray",
    [
        observation(1),  # late, or twice
        observation(3),  # to come
        message("state", 1, data={}),
        error(1, "EXECUTION_ERROR"),
        message("closed", 99),
        message("opened", 2**52 + 1, session="s", token="t", last_id=0),
        message("cancelled", 2**52 + 2, found=True),
        message("pong", 5),
        message("event", 1, event="progress", progress=1),
        message("event", None, event="something new"),
        message("something new", 77),
        b"{}",
    ],
)
def test_a_message_that_answers_nothing_open_is_dropped(session: ResumableSession, stray: bytes) -> None:
    session.request("reset")
    session.receive(observation(1))
    session.request("step", {})
    assert session.receive(stray) is None
    assert session.is_waiting
    assert session.receive(observation(2, 2)) == {"observation": {"n": 2}, "reward": None, "done": False}


def test_an_error_is_raised_for_its_own_request_only(session: ResumableSession) -> None:
    session.request("reset")
    with pytest.raises(ExecutionError, match=r"Server error: m \(code: EXECUTION_ERROR\)"):
        session.receive(error(1, "EXECUTION_ERROR"))
    assert not session.is_waiting
    assert session.receive(error(1, "EXECUTION_ERROR")) is None


def test_an_error_without_an_id_is_that_of_the_only_open_request(session: ResumableSession) -> None:
    assert session.receive(error(None, "VALIDATION_ERROR")) is None
    session.request("reset")
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        session.receive(error(None, "VALIDATION_ERROR"))


@pytest.mark.parametrize("raw", [b"nonsense", b"[]", b"null", b"7", message("observation", 1), message("state", 1)])
def test_what_is_no_message_or_no_reply_is_a_protocol_error(session: ResumableSession, raw: bytes) -> None:
    session.request("reset")
    with pytest.raises(ProtocolError):
        session.receive(raw)


def test_events_of_the_open_request_are_given_out(session: ResumableSession) -> None:
    session.request("mcp", {"jsonrpc": "2.0"})
    event = session.receive(message("event", 1, event="progress", progress=1, total=2))
    assert isinstance(event, Event)
    assert (event.name, event.content["progress"], event.content["total"]) == ("progress", 1, 2)
    assert session.is_waiting


def test_a_session_that_is_no_longer_this_connections_is_lost_with_the_servers_reason(
    session: ResumableSession,
) -> None:
    with pytest.raises(SessionLost) as caught:
        session.receive(b'{"type":"event","event":"detached","session":"s","reason":"resumed elsewhere"}')
    assert caught.value.reason == "resumed elsewhere"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["observation", "state", "mcp", "error", "event", "opened", "closed", "x"]),
            st.one_of(st.none(), st.integers(-3, 12), st.text(max_size=3), st.booleans()),
            st.booleans(),
        ),
        max_size=30,
    ),
    st.integers(2, 9),
)
def test_no_sequence_of_other_messages_answers_a_request(strangers: list[tuple[str, Any, bool]], own_id: int) -> None:
    session = ResumableSession()
    opened(session, last_id=own_id - 1)
    assert json.loads(session.request("step", {}))["id"] == own_id
    for kind, message_id, has_data in strangers:
        if (type(message_id) is int and message_id == own_id) or message_id is None:
            continue
        data = {"data": {"code": "EXECUTION_ERROR"}} if has_data else {}
        assert session.receive(json.dumps({"type": kind, "id": message_id, **data}).encode()) is None
    assert session.receive(observation(own_id, 5)) == {"observation": {"n": 5}, "reward": None, "done": False}


# -- opening and resuming -----------------------------------------------------------------------------------------


def test_opening_asks_for_a_new_session_and_keeps_its_token() -> None:
    session = ResumableSession()
    assert session.token is None
    request = opened(session, token="b1.s.secret")
    assert {key for key in request} == {"type", "id", "nonce"}
    assert session.is_attached
    assert session.token == "b1.s.secret"


def test_a_resume_names_the_token_and_the_unanswered_request_is_repeated_as_it_was(session: ResumableSession) -> None:
    session.request("reset")
    session.receive(observation(1))
    payload = session.request("step", {"n": 1})
    session.is_attached = False
    request = opened(session, last_id=2)
    assert request["resume"] == "b1.s.t"
    assert session.is_waiting
    assert json.loads(payload)["id"] == 2
    assert session.receive(observation(2, 9)) == {"observation": {"n": 9}, "reward": None, "done": False}


def test_each_open_has_an_id_of_its_own_and_late_answers_to_earlier_ones_are_dropped() -> None:
    session = ResumableSession()
    first = json.loads(session.open_request())["id"]
    second = json.loads(session.open_request())["id"]
    assert second > first
    assert not session.opened(message("opened", first, session="s", token="old", last_id=0))
    assert not session.opened(message("event", second, event="queued", position=3))
    assert session.opened(message("opened", second, session="s", token="new", last_id=0))
    assert session.token == "new"


def test_a_client_that_takes_over_counts_on_from_where_the_session_is() -> None:
    session = ResumableSession("b1.s.t")
    assert opened(session, last_id=41)["resume"] == "b1.s.t"
    assert json.loads(session.request("step", {}))["id"] == 42


def test_a_session_that_another_client_has_used_meanwhile_is_not_gone_on_with(session: ResumableSession) -> None:
    """The reply that the server keeps for the id of the open request is the other client's."""
    session.request("step", {})
    request = json.loads(session.open_request())
    with pytest.raises(ContinuedElsewhere):
        session.opened(message("opened", request["id"], session="s", token="t", last_id=2))


@pytest.mark.parametrize("reason", ["expired", "closed", "server restarted", "worker crashed", "unknown"])
def test_the_reason_of_a_lost_session_is_the_servers(reason: str) -> None:
    session = ResumableSession("b1.s.t")
    request = json.loads(session.open_request())
    with pytest.raises(SessionLost) as caught:
        session.opened(error(request["id"], "SESSION_LOST", reason=reason))
    assert caught.value.reason == reason


@pytest.mark.parametrize("kind", ["opened", "closed", "observation"])
def test_an_answer_to_open_that_is_none_is_a_protocol_error(kind: str) -> None:
    session = ResumableSession()
    request = json.loads(session.open_request())
    with pytest.raises(ProtocolError):
        session.opened(message(kind, request["id"]))


def test_cancel_names_the_open_request_or_else_the_open_itself(session: ResumableSession) -> None:
    assert session.cancel_request() is None
    session.request("reset")
    assert json.loads(session.cancel_request() or b"")["request"] == 1
    fresh = ResumableSession()
    open_id = json.loads(fresh.open_request())["id"]
    cancel = json.loads(fresh.cancel_request() or b"")
    assert (cancel["type"], cancel["request"]) == ("cancel", open_id)
    assert cancel["id"] > open_id


# -- losing -------------------------------------------------------------------------------------------------------


def test_a_lost_episode_stays_lost_until_a_reset_is_answered(session: ResumableSession) -> None:
    session.request("step", {})
    session.lose("timeout")
    session.lose("a later reason")
    assert session.token is None
    for kind in ("step", "state", "mcp"):
        with pytest.raises(SessionLost, match="timeout"):
            session.request(kind, {})
    opened(session)
    session.request("reset", {})
    with pytest.raises(ExecutionError):
        session.receive(error(1, "EXECUTION_ERROR"))
    assert session.lost_reason == "timeout"
    session.request("reset", {})
    session.receive(observation(2))
    assert session.lost_reason is None
    session.request("step", {})


def test_a_lost_session_is_not_resumed(session: ResumableSession) -> None:
    session.lose("timeout")
    assert "resume" not in json.loads(session.open_request())


def test_a_stranded_session_is_only_good_for_a_reset(session: ResumableSession) -> None:
    session.request("step", {})
    session.lose("out of reach", is_stranded=True)
    assert session.token is None
    with pytest.raises(SessionLost, match="out of reach"):
        session.request("step", {})
    assert opened(session, last_id=1)["resume"] == "b1.s.t"
    assert json.loads(session.request("reset"))["id"] == 2
    session.receive(observation(2))
    assert session.token == "b1.s.t"


# -- error codes --------------------------------------------------------------------------------------------------


def test_the_codes_of_v2_have_their_exceptions() -> None:
    stale = error_from_frame({"message": "m", "code": "STALE_REQUEST", "last_id": 9})
    assert isinstance(stale, StaleRequest)
    assert stale.last_id == 9
    assert isinstance(error_from_frame({"message": "m", "code": "CANCELLED"}), RequestCancelled)
    forbidden = error_from_frame({"message": "m", "code": "FORBIDDEN", "role": "agent"})
    assert isinstance(forbidden, Forbidden)
    assert forbidden.role == "agent"
    full = error_from_frame({"message": "m", "code": "CAPACITY_REACHED", "retry_after_s": 2})
    assert isinstance(full, SessionCapacityError)
    assert full.retry_after_s == 2
    assert full.details["retry_after_s"] == 2
