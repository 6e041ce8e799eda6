"""What should not happen in an environment or its input, and must leave no request without a reply:
exceptions that are no `Exception`, validators that raise anything, tools that are none, replies that cannot be read."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from fastmcp import FastMCP
from pydantic import field_validator
from websockets.sync.client import ClientConnection, connect

from environments import Idle, Tools
from openenv.protocol.codec import MSGPACK
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.app import create_fastapi_app
from openenv.server.sessions.ledger import KEPT
from openenv.types import Action, Observation
from servers import Serve

SOON = 30.0
KEY = "a key that nobody has"


class Odd(BaseException):
    """What no environment should raise."""


class Try(Action):
    what: str = ""

    @field_validator("what")
    @classmethod
    def check(cls, what: str) -> str:
        if what == "unfit":
            raise TypeError("no such thing")
        return what


class Seen(Observation):
    deep: Any = None


class Trying(Idle):
    """Does what its action says, however odd, on one thread for all sessions."""

    REQUIRES_SINGLE_THREAD_EXECUTOR = True
    holding = threading.Event()
    release = threading.Event()
    steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        return Seen()

    def step(self, action: Try, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        type(self).steps += 1
        deep: Any = None
        match action.what:
            case "odd":
                raise Odd("what was that")
            case "cancelled":
                raise asyncio.CancelledError
            case "hold":
                type(self).holding.set()
                assert type(self).release.wait(SOON)
            case "deep":
                for _ in range(250):
                    deep = [deep]
        return Seen(deep=deep, reward=1.0)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    Trying.holding.clear()
    Trying.release.clear()
    Trying.steps = 0
    yield
    Trying.release.set()


class Peer:
    """A v2 client that sends exactly what a test writes."""

    def __init__(self, server: Any) -> None:
        url = f"ws://127.0.0.1:{server.port}/ws"
        protocols: Any = ["openenv.v2.json"]
        self.connection: ClientConnection = connect(url, subprotocols=protocols, proxy=None).__enter__()

    def send(self, **message: Any) -> None:
        self.connection.send(json.dumps(message))

    def take(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=SOON))
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(**message)
        return self.take()


def test_a_step_that_is_repeated_is_answered_though_the_next_one_begins_before_its_group_is_done(serve: Serve) -> None:
    server = serve(create_fastapi_app(Trying, Try, Seen, max_concurrent_envs=4))
    peer = Peer(server)
    first, slow = (peer.ask(type="open", id=number)["session"] for number in (1, 2))
    step = {"type": "step", "id": 1, "session": first, "data": {}}
    hold = {"type": "step", "id": 1, "session": slow, "data": {"what": "hold"}}
    peer.send(type="batch", id=3, requests=[step, hold])
    assert Trying.holding.wait(SOON)  # the first step is done, and its reply is not sent
    peer.send(**step)
    peer.send(type="batch", id=4, requests=[{**step, "id": 2}])
    assert peer.ask(type="ping", id=5)["type"] == "pong"
    Trying.release.set()
    answers = [peer.take() for _ in range(3)]
    alone = [answer for answer in answers if answer["type"] == "observation"]
    assert [(answer["id"], answer["session"]) for answer in alone] == [(1, first)]
    assert sorted(answer["id"] for answer in answers if answer["type"] == "batch") == [3, 4]
    assert Trying.steps == 3
    peer.connection.close()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("binary", [True, False])
def test_a_validator_may_raise_anything(serve: Serve, together: bool, binary: bool) -> None:
    server = serve(create_fastapi_app(Trying, Try, Seen, max_concurrent_envs=4))
    protocols: Any = ["openenv.v2.msgpack" if binary else "openenv.v2.json"]
    with connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=protocols, proxy=None) as connection:

        def ask(message: dict[str, Any]) -> dict[str, Any]:
            connection.send(MSGPACK.encode(message) if binary else json.dumps(message))
            reply: Any = connection.recv(timeout=SOON)
            return MSGPACK.decode(reply, binary=True) if binary else json.loads(reply)

        session = ask({"type": "open", "id": 1})["session"]
        unfit = {"type": "step", "id": 1, "session": session, "data": {"what": "unfit"}}
        answer = ask({"type": "batch", "id": 2, "requests": [unfit]} if together else unfit)
        refusal = answer["replies"][0] if together else answer
        assert refusal["data"]["code"] == "VALIDATION_ERROR"
        assert "no such thing" in str(refusal["data"]["errors"])
        assert ask({**unfit, "data": {}})["type"] == "observation"  # the connection holds, and the id is still new


@pytest.mark.parametrize("what", ["odd", "cancelled"])
def test_a_keyed_request_that_raised_no_exception_is_answered_again(serve: Serve, what: str) -> None:
    server = serve(create_fastapi_app(Trying, Try, Seen, max_concurrent_envs=4))
    with httpx2.Client(base_url=server.url, timeout=SOON) as client:
        session = client.post("/sessions").json()["session_id"]
        headers = {"X-OpenEnv-Session": session, "Idempotency-Key": KEY}
        replies = [client.post("/step", headers=headers, json={"action": {"what": what}}) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [500, 500]
    assert {reply.json()["code"] for reply in replies} == {"EXECUTION_ERROR"}
    assert Trying.steps == 1


def test_a_keyed_request_whose_handler_is_cancelled_is_answered_when_it_is_repeated(serve: Serve) -> None:
    app = create_fastapi_app(Trying, Try, Seen, max_concurrent_envs=4)
    handlers: list[asyncio.Task[Any]] = []

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        """What is around the application may have limits of its own."""
        task = asyncio.ensure_future(app(scope, receive, send))
        if scope.get("path") == "/step":
            handlers.append(task)
        try:
            await task
        except asyncio.CancelledError:
            await send({"type": "http.response.start", "status": 504, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    url = serve(limited).url
    with httpx2.Client(base_url=url, timeout=SOON) as client, ThreadPoolExecutor(1) as beside:
        session = client.post("/sessions").json()["session_id"]
        headers = {"X-OpenEnv-Session": session, "Idempotency-Key": KEY}
        request: Any = {"headers": headers, "json": {"action": {"what": "hold"}}}
        first = beside.submit(httpx2.post, f"{url}/step", timeout=SOON, **request)
        assert Trying.holding.wait(SOON)
        handlers[0].get_loop().call_soon_threadsafe(handlers[0].cancel)
        assert first.result(SOON).status_code == 504
        Trying.release.set()
        again = client.post("/step", **request)
    assert (again.status_code, again.json()["reward"]) == (200, 1.0)
    assert Trying.steps == 1


class OwnTools(Tools):
    """An environment whose author has another use for the name `tools`."""

    def __init__(self) -> None:
        super().__init__(FastMCP("own"))
        self.tools: Any = ["hammer"]

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(reward=1.0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("together", [True, False])
def test_tools_that_are_none_fail_the_step_and_nothing_else(serve: Serve, together: bool) -> None:
    peer = Peer(serve(create_fastapi_app(OwnTools, CallToolAction, CallToolObservation, max_concurrent_envs=4)))
    session = peer.ask(type="open", id=1)["session"]
    step = {"type": "step", "id": 1, "session": session, "data": {"tool_name": "hammer", "arguments": {}}}
    answer = peer.ask(type="batch", id=2, requests=[step]) if together else peer.ask(**step)
    assert (answer["replies"][0] if together else answer)["data"]["code"] == "EXECUTION_ERROR"
    assert peer.ask(type="state", id=2, session=session)["type"] == "state"
    peer.connection.close()


@pytest.mark.parametrize("together", [True, False])
def test_a_reply_that_cannot_be_read_again_is_an_error_in_another_encoding(serve: Serve, together: bool) -> None:
    server = serve(create_fastapi_app(Trying, Try, Seen, max_concurrent_envs=4))
    peer = Peer(server)
    opened = peer.ask(type="open", id=1)
    step = {"type": "step", "id": 1, "session": opened["session"], "data": {"what": "deep"}}
    peer.send(**({"type": "batch", "id": 2, "requests": [step]} if together else step))
    assert "[" * 200 in str(peer.connection.recv(timeout=SOON))
    protocols: Any = ["openenv.v2.msgpack"]
    with connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=protocols, proxy=None) as connection:
        for message in ({"type": "open", "id": 1, "resume": opened["token"]}, step, {**step, "id": 2, "data": {}}):
            connection.send(MSGPACK.encode(message))
            reply: Any = connection.recv(timeout=SOON)
            answer = MSGPACK.decode(reply, binary=True)
            if message is step:
                assert (answer["id"], answer["data"]["code"]) == (1, "EXECUTION_ERROR")
        assert answer["type"] == "observation"
    peer.connection.close()


def test_a_key_whose_reply_is_gone_is_refused_and_counted(serve: Serve) -> None:
    server = serve(create_fastapi_app(Trying, Try, Seen, max_concurrent_envs=4))
    codes: list[str | None] = []
    server.manager.listeners.append(lambda event: codes.append(event.reason) if event.name == "error" else None)
    with httpx2.Client(base_url=server.url, timeout=SOON) as client:
        session = client.post("/sessions").json()["session_id"]
        for number in [*range(KEPT + 2), 0]:
            headers = {"X-OpenEnv-Session": session, "Idempotency-Key": f"{KEY} {number}"}
            reply = client.post("/step", headers=headers, json={"action": {}})
    assert (reply.status_code, reply.json()["code"]) == (409, "STALE_REQUEST")
    assert codes == ["STALE_REQUEST"]
    assert Trying.steps == KEPT + 2
