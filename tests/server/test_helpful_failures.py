"""What a failure says: the hint about a missing reset, tool actions by their shape, the log line, an unknown token."""

from __future__ import annotations

import logging
from typing import Any

import httpx2
import pytest
from fastmcp import FastMCP

import http_calls
from environments import Tools
from openenv import (
    Action,
    Environment,
    GenericEnvClient,
    LocalEnv,
    Observation,
    State,
    VectorEnv,
    create_app,
)
from openenv.errors import AccessDenied, ExecutionError, RequestValidationError, SlotsFailed
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.access import AccessPolicy
from openenv.server.sessions.session import SessionKind
from servers import Serve

HINT = "reset() has not been called in this session yet"
MISSING = "has no attribute 'left'"


class Move(Action):
    by: int = 1


class Countdown(Environment[Move, Observation, State]):
    """Has its state from `reset` only, as many environments do."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, **kwargs: Any) -> Observation:
        self.left = 3
        return Observation()

    def step(self, action: Move, **kwargs: Any) -> Observation:
        if action.by > 5:
            raise RuntimeError("too far")
        self.left -= action.by
        return Observation(done=self.left <= 0)

    @property
    def state(self) -> State:
        return State(step_count=self.left)


@pytest.fixture
def url(serve: Serve) -> str:
    return str(serve(create_app(Countdown, Move, Observation, max_concurrent_envs=8)).url)


# -- step before reset ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_step_before_any_reset_says_that_there_was_none(url: str, protocol: str) -> None:
    with GenericEnvClient(url, protocol=protocol).sync() as env:
        with pytest.raises(ExecutionError, match=MISSING) as failed:
            env.step({"by": 1})
        assert HINT in str(failed.value)
        assert failed.value.code == "EXECUTION_ERROR"
        with pytest.raises(ExecutionError) as failed:
            env.state()  # as environments of others are known to answer
        assert HINT not in str(failed.value)
        env.reset()
        assert env.step({"by": 1}).done is False
        with pytest.raises(ExecutionError, match="too far") as failed:
            env.step({"by": 9})
        assert HINT not in str(failed.value)


def test_steps_of_a_vector_before_any_reset_say_so_too(url: str) -> None:
    with VectorEnv(url, 3, connections=1) as envs, pytest.raises(SlotsFailed) as failed:
        envs.step([{"by": 1}] * 3)
    assert [HINT in str(error) for error in failed.value.errors.values()] == [True] * 3


@pytest.mark.anyio
async def test_over_http_the_hint_is_in_the_detail() -> None:
    app = create_app(Countdown, Move, Observation, max_concurrent_envs=8)
    manager = app.state.openenv_server.manager
    session = await manager.open(SessionKind.HTTP)
    transport = httpx2.ASGITransport(app=app)
    headers = {"X-OpenEnv-Session": session.id}
    async with httpx2.AsyncClient(transport=transport, base_url="http://server", headers=headers) as http:
        reply = await http.post("/step", json={"action": {"by": 1}})
        assert reply.status_code == 500
        assert reply.json()["code"] == "EXECUTION_ERROR"
        assert MISSING in reply.json()["detail"]
        assert HINT in reply.json()["detail"]
        await http.post("/reset", json={})
        assert (await http.post("/step", json={"action": {"by": 9}})).json()["detail"] == "too far"
    session.close()
    await manager.drain()


def test_a_step_without_a_session_leaves_a_hint_in_the_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "openenv"):
        assert http_calls.post(f"{url}/step", json={"action": {}}, trust_env=False).status_code == 500
    assert any("never reset" in text and "X-OpenEnv-Session" in text for text in caplog.messages)


def test_in_the_same_process_the_hint_is_there_too() -> None:
    with LocalEnv(Countdown).sync() as env:
        with pytest.raises(ExecutionError, match=MISSING) as failed:
            env.step({"by": 1})
        assert HINT in str(failed.value)
        env.reset()
        with pytest.raises(ExecutionError, match="too far") as failed:
            env.step({"by": 9})
        assert HINT not in str(failed.value)


# -- the log --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_the_log_names_the_session_and_the_operation_that_failed(
    url: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "openenv"), GenericEnvClient(url, protocol=protocol).sync() as env:
        with pytest.raises(ExecutionError):
            env.state()
        env.reset()
        with pytest.raises(ExecutionError):
            env.step({"by": 9})
    texts = [text for text in caplog.messages if " failed" in text]
    assert len(texts) == 2
    assert texts[0].startswith("session ")
    assert ": state failed" in texts[0]
    assert ": step failed" in texts[1]


# -- tool actions ---------------------------------------------------------------------------------------------------


class Bench(Tools):
    """Has one tool."""

    def __init__(self) -> None:
        server = FastMCP("bench")
        server.tool(self.put)
        super().__init__(server)

    def put(self, item: str) -> str:
        """Put something on the bench."""
        return item


@pytest.mark.parametrize("protocol", ["v1", "v2", "http"])
@pytest.mark.parametrize(
    ("action_cls", "action"),
    [
        (Action, {"tool_name": "put", "arguments": {"item": "pear"}}),
        (Action, {"type": "put", "item": "pear"}),
        (CallToolAction, {"name": "put"}),
        (CallToolAction, {"type": "put"}),
    ],
)
def test_a_tool_action_of_no_known_type_is_answered_with_the_shapes(
    serve: Serve, protocol: str, action_cls: type[Action], action: dict[str, Any]
) -> None:
    url = serve(create_app(Bench, action_cls, CallToolObservation)).url
    if protocol == "http":
        reply = http_calls.post(f"{url}/step", json={"action": action}, trust_env=False)
        assert reply.status_code == 422
        text, errors = reply.text.replace('\\"', '"'), reply.json()["detail"]
    else:
        with GenericEnvClient(url, protocol=protocol).sync() as env:
            env.reset()
            with pytest.raises(RequestValidationError) as refused:
                env.step(action)
        text, errors = str(refused.value), refused.value.details["errors"]
    assert '{"type": "list_tools"}' in text
    assert '{"type": "call_tool", "tool_name": "NAME", "arguments": {...}}' in text
    assert len(errors) > 1, "what is wrong with the fields is still reported"


def test_an_environment_without_tools_does_not_speak_of_them(serve: Serve) -> None:
    with LocalEnv(Countdown, Action).sync() as env:
        with pytest.raises(RequestValidationError) as refused:
            env.step({"direction": "north"})
        assert "call_tool" not in str(refused.value)


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_distinguished_from_none(serve: Serve) -> None:
    app = create_app(Countdown, Move, Observation)
    app.state.openenv_server.reconfigure(access=AccessPolicy(orchestrator="right-one"))
    url = serve(app).url
    none, wrong, lame = (
        http_calls.post(f"{url}/reset", json={}, headers=headers, trust_env=False)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic wrong"})
    )
    assert [reply.status_code for reply in (none, wrong, lame)] == [401] * 3
    assert [reply.json()["code"] for reply in (none, wrong, lame)] == ["UNAUTHORIZED"] * 3
    assert "asks for a token" in none.json()["detail"]
    assert none.json() == lame.json()
    assert wrong.json()["detail"] == "This server does not know this token."
    assert none.headers["www-authenticate"] == "Bearer"
    assert wrong.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    for token, advice in ((None, "Pass token=, or set OPENENV_TOKEN."), ("wrong", "Check token= and OPENENV_TOKEN.")):
        with pytest.raises(AccessDenied) as refused:
            GenericEnvClient(url, token=token).sync().reset()
        assert str(refused.value).endswith(advice)
