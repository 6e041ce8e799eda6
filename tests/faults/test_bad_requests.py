"""Bad requests: each gets an error that says what is wrong, and the session goes on as if it had not come."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import field_validator

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import Action, Observation
from servers import PlainAsgi, Serve

Carry = Callable[..., Any]


@pytest.fixture(params=["own", "middleware", "uvicorn", "uvicorn and middleware"])
def carry(request: pytest.FixtureRequest, serve: Serve) -> Carry:
    """Serve an application in each of the ways a WebSocket can be carried."""

    def start(app: Any) -> Any:
        if "middleware" in request.param:
            app.add_middleware(PlainAsgi)
        return serve(app, **({"ws": "websockets-sansio"} if "uvicorn" in request.param else {}))

    return start


class Picky(Action):
    """An action whose validators raise what validators raise."""

    word: str = ""
    number: int = 0

    @field_validator("word")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "bad":
            raise ValueError("that word is not allowed")
        if value == "assert":
            raise AssertionError("that cannot be")
        if value == "key":
            raise KeyError("outside pydantic's own")
        return value


def picky_app(probe: Any) -> Any:
    """Serve an environment that takes picky actions."""

    def step(env: Any, action: Picky, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        env.count += 1
        return Observation(reward=float(env.count))

    picky_env = type("PickyEnv", (probe.factory().func,), {"step": step})
    return create_app(probe.factory(picky_env), Picky, Observation)


@pytest.mark.parametrize("word", ["bad", "assert", "key"])
def test_a_custom_validator_that_raises_keeps_the_session(serve: Serve, probe: Any, peer: Any, word: str) -> None:
    """W3: over WebSocket a validator's exception is a VALIDATION_ERROR, and the episode goes on."""
    one = peer(serve(picky_app(probe)).port)
    one.reset()
    assert one.step(word="fine")["data"]["reward"] == 1.0
    refused = one.step(word=word)
    assert refused["data"]["code"] == "VALIDATION_ERROR"
    assert refused["data"]["errors"]
    assert one.step(word="fine")["data"]["reward"] == 2.0


@pytest.mark.parametrize("word", ["bad", "assert", "key"])
def test_a_custom_validator_that_raises_is_unprocessable_over_http(
    serve: Serve, probe: Any, http: Any, word: str
) -> None:
    """W3: over HTTP it is a 422 that names the field, not a 500."""
    answer = http(serve(picky_app(probe)).url).post("/step", json={"action": {"word": word}})
    assert answer.status_code == 422
    assert answer.json()["detail"]
    if word == "bad":
        assert answer.json()["detail"][0]["loc"] == ["word"]
        assert "that word is not allowed" in answer.text


DEEP = "[" * 100_000 + "]" * 100_000

BAD_FRAMES = {  # parsers differ in where numbers end
    "array": ("[1, 2]", "INVALID_JSON"),
    "number": ("17", "INVALID_JSON"),
    "string": ('"step"', "INVALID_JSON"),
    "null": ("null", "INVALID_JSON"),
    "empty": ("", "INVALID_JSON"),
    "no JSON": ("{type: step}", "INVALID_JSON"),
    "deep array": (DEEP, "INVALID_JSON"),
    "deep inside": (
        '{"type": "step", "data": {"metadata": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}}",
        "INVALID_JSON",
    ),
    "lone surrogate": ('{"type": "\\ud800"}', "INVALID_JSON"),
    "huge number": ('{"type": ' + "9" * 4000 + "}", "UNKNOWN_TYPE INVALID_JSON"),
    "very huge number": ('{"type": ' + "9" * 50_000 + "}", "UNKNOWN_TYPE INVALID_JSON"),
    "no type": ("{}", "UNKNOWN_TYPE"),
    "unknown type": ('{"type": "fly"}', "UNKNOWN_TYPE"),
    "type is an object": ('{"type": {"a": 1}}', "UNKNOWN_TYPE"),
    "step without data": ('{"type": "step"}', "VALIDATION_ERROR"),
    "step with array": ('{"type": "step", "data": [1]}', "VALIDATION_ERROR"),
    "extra key": ('{"type": "step", "data": {}, "more": 1}', "VALIDATION_ERROR"),
    "unknown field": ('{"type": "step", "data": {"colour": "red"}}', "VALIDATION_ERROR"),
    "wrong field": ('{"type": "step", "data": {"number": "many"}}', "VALIDATION_ERROR"),
    "huge wrong field": (json.dumps({"type": "step", "data": {"number": "x" * 3_000_000}}), "VALIDATION_ERROR"),
    "reset with array": ('{"type": "reset", "data": [1]}', "VALIDATION_ERROR"),
}


def test_bad_frames_are_answered_and_the_session_lives(probe: Any, peer: Any, carry: Carry) -> None:
    """W10: whatever a frame holds, its answer is one short error frame and the episode goes on."""
    one = peer(carry(probe.app()).port)
    one.reset()
    for count, (name, (frame, codes)) in enumerate(BAD_FRAMES.items(), start=1):
        answer = one.ask(frame)
        assert answer["type"] == "error", name
        assert answer["data"]["code"] in codes.split(), name
        assert len(json.dumps(answer)) < 100_000, name
        assert one.step()["data"]["observation"]["count"] == count, name
    assert probe.count("built") == 1


def test_text_that_is_no_text_never_ends_in_a_traceback(
    probe: Any, peer: Any, carry: Carry, caplog: pytest.LogCaptureFixture
) -> None:
    """W10: a text frame that is not UTF-8 is an error frame or, where the server checks it, a clean close."""
    one = peer(carry(probe.app()).port)
    one.reset()
    one.send(b'{"type": "st\xff\xfe"}')
    try:
        answer = one.receive()
    except ConnectionError as closed:
        answer = {"data": {"code": str(closed)}}
    assert answer["data"]["code"] in ("INVALID_JSON", "UNKNOWN_TYPE", "closed with code 1007")  # RFC 6455, 8.1
    assert not [record for record in caplog.records if record.exc_info]


def test_a_binary_frame_with_json_is_read_as_json(probe: Any, peer: Any, carry: Carry) -> None:
    """W10: JSON is JSON in either kind of frame; bytes that are none get an error and the session lives."""
    one = peer(carry(probe.app()).port)
    one.send_binary(b'{"type": "step", "data": {"number": 5}}')
    assert one.receive()["data"]["observation"]["number"] == 5
    one.send_binary(b"\x00\x01\xff")
    assert one.receive()["data"]["code"] == "INVALID_JSON"
    assert one.step()["data"]["observation"]["count"] == 2


def test_frames_sent_ahead_are_answered_in_order(probe: Any, peer: Any, carry: Carry) -> None:
    """W10: good and bad frames sent at once get one answer each, in the order they came."""
    one = peer(carry(probe.app()).port)
    for number in range(50):
        one.send({"type": "step", "data": {"number": number}} if number % 3 else "[]")
    for number in range(50):
        answer = one.receive()
        if number % 3:
            assert answer["data"]["observation"]["number"] == number
        else:
            assert answer["data"]["code"] == "INVALID_JSON"


def test_a_message_over_the_limit_is_refused_and_the_session_lives(
    probe: Any, peer: Any, http: Any, carry: Carry
) -> None:
    """W10, W16: too big a frame is answered with an error, too big a body with 413; nothing of it is kept."""
    app = probe.app()
    service = app.state.openenv_server.service
    service.options = dataclasses.replace(service.options, max_message_bytes=10_000)
    server = carry(app)
    one = peer(server.port)
    one.step()
    refused = one.ask({"type": "step", "data": {"fail": "x" * 20_000}})
    assert refused["data"]["code"] == "VALIDATION_ERROR"
    assert refused["data"]["limit_bytes"] == 10_000
    assert one.step()["data"]["observation"]["count"] == 2
    answer = http(server.url).post("/step", json={"action": {"fail": "x" * 20_000}})
    assert (answer.status_code, answer.json()["code"]) == (413, "BODY_TOO_LARGE")


def test_production_mode_has_no_gym_interface_over_http(serve: Serve, probe: Any, http: Any) -> None:
    """W16: with `mode="production"` HTTP cannot reset, step or look at the state; agents' tokens cannot over `/ws`."""
    client = http(serve(probe.app(mode="production")).url)
    assert [client.post("/reset").status_code, client.post("/step", json={"action": {}}).status_code] == [404, 404]
    assert client.get("/state").status_code == 404
    assert probe.count("reset") == probe.count("step") == probe.count("state") == 0


def test_a_sockets_session_cannot_be_reached_by_its_id(serve: Serve, probe: Any, peer: Any, http: Any) -> None:
    """W16: knowing a session's id is not enough to step the environment of another client's connection."""
    server = serve(probe.app())
    peer(server.port).reset()
    [session] = server.manager.sessions()
    answer = http(server.url).post("/step", json={"action": {}}, headers={"X-OpenEnv-Session": session.id})
    assert answer.status_code == 404
    attached = peer(server.port, f"/ws?session_id={session.id}").receive()
    assert attached["data"]["code"] == "SESSION_ERROR"
