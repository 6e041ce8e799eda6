"""`WS /harness`: a conversation over a real socket with a real process behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import http_calls
from environments import Heard, Parrot, Say
from openenv.errors import HarnessStartupError
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.types import Observation
from servers import RunningServer
from turn_environments import TalkingEnv, talking_app
from waiting import wait_until

Serve = Callable[..., RunningServer]


@contextmanager
def talk(server: RunningServer, **options: Any) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}/harness", **options) as connection:
        yield connection


def hear(connection: ClientConnection) -> Any:
    return json.loads(connection.recv(timeout=60))


def say(connection: ClientConnection, text: str) -> list[Any]:
    """Send a message; return the frames up to the end of the turn."""
    connection.send(json.dumps({"type": "message", "content": text}))
    frames = [hear(connection)]
    while frames[-1]["type"] not in ("turn_complete", "error"):
        frames.append(hear(connection))
    return frames


def closed_with(connection: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as caught:
        connection.recv(timeout=20)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code


@pytest.mark.parametrize("fast", [True, False])
def test_a_conversation(serve: Serve, fast: bool) -> None:
    server = serve(talking_app(fast=fast))
    with talk(server) as connection:
        started = hear(connection)
        assert started["type"] == "session_started"
        assert started["data"]["harness"] == "talker"
        assert server.manager.info(started["data"]["session_id"]) is not None
        frames = say(connection, "echo hello")
        assert [frame["type"] for frame in frames] == ["text_output", "turn_complete"]
        assert frames[-1]["data"] == {"response": "hello", "done": False}
        assert isinstance(frames[-1]["timestamp"], float)
        assert say(connection, 'call add {"a": 2, "b": 5}')[-1]["data"]["response"] == "7"
        assert say(connection, "count")[-1]["data"]["response"] == "3"
        assert server.manager.info(started["data"]["session_id"]).step_count == 3
    server.wait_for(lambda: server.manager.active == 0)


def test_frames_that_are_no_messages_cost_nothing(serve: Serve) -> None:
    with talk(serve(talking_app(max_message_bytes=100_000))) as connection:
        hear(connection)
        for frame, code, text in [
            ("nonsense", "INVALID_JSON", "Invalid JSON"),
            ("[1]", "VALIDATION_ERROR", "Invalid message"),
            ('{"type": "step"}', "VALIDATION_ERROR", "content: Field required"),
            ('{"type": "message", "content": 5}', "VALIDATION_ERROR", "content"),
            (b"\xff\x00", "INVALID_JSON", "Invalid JSON"),
            ('"' + "x" * 200_000 + '"', "VALIDATION_ERROR", "over the limit of 100000 bytes"),
        ]:
            connection.send(frame)
            refusal = hear(connection)
            assert (refusal["type"], refusal["data"]["code"]) == ("protocol_error", code)
            assert text in refusal["data"]["message"]
        assert say(connection, "echo still here")[-1]["data"]["response"] == "still here"


def test_messages_sent_ahead_are_taken_in_turn(serve: Serve) -> None:
    with talk(serve(talking_app())) as connection:
        for text in ("echo 1", "echo 2", "count"):
            connection.send(json.dumps({"type": "message", "content": text}))
        frames = [hear(connection) for _ in range(6)]
    assert [frame["data"].get("response") for frame in frames if frame["type"] == "turn_complete"] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("text", "limit_s", "problem"),
    [("quit 3", 60.0, "ended within its turn: the agent gave up"), ("hang", 0.5, "harness turn exceeded 0.5 seconds")],
)
def test_a_turn_that_fails_ends_the_connection(serve: Serve, text: str, limit_s: float, problem: str) -> None:
    server = serve(talking_app(lambda: TalkingEnv(session_timeout_s=limit_s)))
    with talk(server) as connection:
        hear(connection)
        last = say(connection, text)[-1]
        assert last["type"] == "error"
        assert last["data"]["recoverable"] is False
        assert problem in last["data"]["message"]
        assert closed_with(connection) == 1000
    server.wait_for(lambda: server.manager.active == 0)


def test_errors_are_redacted_where_the_server_asks_for_it(serve: Serve) -> None:
    with talk(serve(talking_app(redact_errors=True))) as connection:
        hear(connection)
        message = say(connection, "quit 3")[-1]["data"]["message"]
    assert "gave up" not in message
    assert "log" in message


class Refusing(TalkingEnv):
    """Its agent does not start."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Fail."""
        raise HarnessStartupError("no agent today")


def broken() -> TalkingEnv:
    raise ValueError("no factory today")


@pytest.mark.parametrize(
    ("env", "code", "text"),
    [(Refusing, "SESSION_ERROR", "no agent today"), (broken, "FACTORY_ERROR", "failed to create instance")],
)
def test_a_session_that_cannot_begin_is_an_ordinary_error(serve: Serve, env: Any, code: str, text: str) -> None:
    server = serve(talking_app(env))
    with talk(server) as connection:
        frame = hear(connection)
        assert (frame["type"], frame["data"]["code"]) == ("error", code)
        assert text in frame["data"]["message"]
        assert closed_with(connection) == 1000
    server.wait_for(lambda: server.manager.active == 0)


def test_a_full_server_says_so(serve: Serve) -> None:
    server = serve(talking_app(max_concurrent_envs=1))
    with talk(server) as first:
        hear(first)
        with talk(server) as second:
            frame = hear(second)
            assert frame["data"]["code"] == "CAPACITY_REACHED"
            assert frame["data"]["max_sessions"] == 1
            assert closed_with(second) == 1000


def test_a_client_that_leaves_in_the_middle_of_a_turn_ends_the_agent(serve: Serve) -> None:
    made: list[TalkingEnv] = []

    def make() -> TalkingEnv:
        made.append(TalkingEnv())
        return made[-1]

    server = serve(talking_app(make))
    with talk(server) as connection:
        hear(connection)
        process: Any = made[0].adapter._process  # type: ignore[attr-defined]
        connection.send(json.dumps({"type": "message", "content": "hang"}))
        assert hear(connection)["data"] == {"text": "thinking"}
    server.wait_for(lambda: server.manager.active == 0)
    assert not process.is_running()


def test_tools_for_the_agent_run_where_the_code_of_its_session_runs(serve: Serve) -> None:
    made: list[TalkingEnv] = []

    def make() -> TalkingEnv:
        made.append(TalkingEnv())
        return made[-1]

    server = serve(talking_app(make, mode="simulation"))
    arguments = {"name": "add", "arguments": {"a": 2, "b": 3}}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": arguments}
    with connect(f"ws://127.0.0.1:{server.port}/ws") as connection:
        for frame in (
            {"type": "reset"},
            {"type": "step", "data": {"message": 'call add {"a": 2, "b": 3}'}},
            {"type": "mcp", "data": rpc},
        ):
            connection.send(json.dumps(frame))
            reply = hear(connection)
            assert reply["type"] != "error", reply
        assert reply["data"]["result"]["data"] == 5
    first, second = made[0].threads
    assert first == second
    assert "server" not in first


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
def test_a_client_that_does_not_read_makes_the_agent_wait(serve: Serve, fast: bool) -> None:
    made: list[TalkingEnv] = []

    def make() -> TalkingEnv:
        made.append(TalkingEnv())
        return made[-1]

    with talk(serve(talking_app(make, fast=fast)), max_queue=1) as connection:
        hear(connection)
        connection.send(json.dumps({"type": "message", "content": "flood 30000"}))
        counts = [0]

        def is_no_more_sent() -> bool:
            counts.append(len(made[0].trajectory))
            return 0 < counts[-2] == counts[-1]

        wait_until(is_no_more_sent, every_s=0.3)
        seen = counts[-1]
        assert 0 < seen < 30000
        count = 0
        while hear(connection)["type"] != "turn_complete":
            count += 1
    assert count == 30000


def test_there_is_no_such_route_in_simulation_or_for_other_environments(serve: Serve) -> None:
    def unknown():  # type: ignore[no-untyped-def]
        return Parrot()

    apps = [talking_app(mode="simulation"), create_app(Parrot, Say, Heard, mode="production")]
    late = create_app(unknown, Say, Heard, mode="production")
    for app in apps:
        with pytest.raises(InvalidStatus), talk(serve(app)):
            pass
    server = serve(late)
    with talk(server) as connection:  # nothing is known of its class yet
        assert "no HarnessEnvironment" in hear(connection)["data"]["message"]
        assert closed_with(connection) == 1000
    with pytest.raises(InvalidStatus), talk(server):
        pass


def test_only_orchestrators_may_talk(serve: Serve) -> None:
    server = serve(talking_app(access=AccessPolicy(orchestrator="boss", agent="worker")))
    for headers in ({}, {"Authorization": "Bearer worker"}):
        with pytest.raises(InvalidStatus), talk(server, additional_headers=headers):
            pass
    with talk(server, additional_headers={"Authorization": "Bearer boss"}) as connection:
        assert hear(connection)["type"] == "session_started"


def test_a_shutdown_lets_the_turn_end(serve: Serve) -> None:
    server = serve(talking_app())
    with talk(server) as connection:
        hear(connection)
        connection.send(json.dumps({"type": "message", "content": "flood 2000"}))
        hear(connection)
        server.server.should_exit = True
        while hear(connection)["type"] != "turn_complete":
            pass
        assert closed_with(connection) == 1012


@pytest.mark.slow
def test_turns_need_a_runner_of_this_process(serve: Serve) -> None:
    with talk(serve(talking_app(runner="process"))) as connection:
        assert "runner" in hear(connection)["data"]["message"]


def test_conversations_are_counted_with_all_other_sessions(serve: Serve) -> None:
    server = serve(talking_app(max_concurrent_envs=3))
    with talk(server) as first, talk(server) as second:
        hear(first)
        hear(second)
        assert http_calls.get(f"{server.url}/ready").json()["active_sessions"] == 2
