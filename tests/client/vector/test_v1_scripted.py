"""`VectorEnv` and servers of protocol v1 that misbehave: an ambiguous answer is a lost session, and waits end."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from openenv import VectorEnv
from openenv.errors import ConnectFailed, ProtocolError, RequestTimeout, SessionCapacityError, SessionLost, SlotsFailed
from servers import Serve

Script = Callable[["Session"], Awaitable[None]]


class Session:
    """A server's end of a socket of protocol v1."""

    def __init__(self, receive: Any, send: Any) -> None:
        self._receive = receive
        self._send = send

    async def receive(self) -> str:
        """Wait for a request and return its type; empty when the client has gone."""
        message = await self._receive()
        return str(json.loads(message["text"])["type"]) if message["type"] == "websocket.receive" else ""

    async def say(self, kind: str, **data: Any) -> None:
        """Send a frame."""
        await self._send({"type": "websocket.send", "text": json.dumps({"type": kind, "data": data})})

    async def mumble(self, text: str) -> None:
        """Send something else."""
        await self._send({"type": "websocket.send", "text": text})

    async def see(self, total: int = 0) -> None:
        """Send an observation."""
        await self.say("observation", observation={"total": total}, reward=1.0, done=False)

    async def hang_up(self) -> None:
        """Close the socket."""
        await self._send({"type": "websocket.close", "code": 1000})


class Scripted:
    """A server that plays a script on each socket, and counts them."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.sockets = 0
        self.state = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve what comes in."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "websocket":
            self.sockets += 1
            await receive()
            await send({"type": "websocket.accept"})
            await self._script(Session(receive, send))


@pytest.fixture
def scripted(serve: Serve) -> Callable[[Script], Any]:
    """Serve a script."""
    return lambda script: serve(Scripted(script))


async def obedient(session: Session) -> None:
    while kind := await session.receive():
        if kind == "close":
            await session.hang_up()
            return
        if kind == "state":
            await session.say("state", step_count=0)
        else:
            await session.see()


def has_heard_all(env: VectorEnv[Any, Any]) -> bool:
    """Read, while no call waits; return whether every connection has come to its end."""
    env.keep_alive()
    return not any(shared.is_open for shared in env._pool.connections)


def lost(env: VectorEnv[Any, Any]) -> list[str]:
    """Step, and return how each slot was lost."""
    with pytest.raises(SlotsFailed) as caught:
        env.step([{}] * env.n)
    assert all(isinstance(error, SessionLost) for error in caught.value.errors.values())
    return [error.reason for error in caught.value.errors.values() if isinstance(error, SessionLost)]


def test_a_state_that_cannot_be_read_yet_is_no_obstacle(scripted: Callable[[Script], Any]) -> None:
    async def script(session: Session) -> None:
        assert await session.receive() == "state"
        await session.say("error", message="reset first", code="EXECUTION_ERROR")
        await obedient(session)

    with VectorEnv(scripted(script).url, 2) as env:
        assert env.reset().ok.all()
        assert env.step([{}] * 2).ok.all()


def test_an_unrequested_message_ends_the_session(scripted: Callable[[Script], Any]) -> None:
    async def script(session: Session) -> None:
        for kind in ("state", "reset"):
            assert await session.receive() == kind
            await session.say("state") if kind == "state" else await session.see()
        await session.see(total=99)  # whose is that?
        await obedient(session)

    server = scripted(script)
    with VectorEnv(server.url, 2) as env:
        env.reset()
        server.wait_for(lambda: has_heard_all(env))
        for _ in range(2):  # nothing of it is taken for an answer
            assert len(lost(env)) == 2
        sockets = server.app.sockets
        env.reset()
        assert server.app.sockets == sockets + 2


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"type":"observation"}'])
def test_what_is_no_message_ends_the_session(scripted: Callable[[Script], Any], text: str) -> None:
    async def script(session: Session) -> None:
        while kind := await session.receive():
            if kind == "step":
                await session.mumble(text)
            else:
                await (session.say("state") if kind == "state" else session.see())

    with VectorEnv(scripted(script).url, 2) as env:
        env.reset()
        assert len(lost(env)) == 2


def test_the_answer_to_another_question_is_an_error(scripted: Callable[[Script], Any]) -> None:
    async def script(session: Session) -> None:
        while kind := await session.receive():
            await (session.see() if kind == "reset" else session.say("state"))

    with VectorEnv(scripted(script).url, 1) as env:
        env.reset()
        with pytest.raises(SlotsFailed) as caught:
            env.step([{}])
        assert isinstance(caught.value.errors[0], ProtocolError)


def test_a_server_says_why_it_has_ended_the_session(scripted: Callable[[Script], Any]) -> None:
    async def script(session: Session) -> None:
        while kind := await session.receive():
            if kind == "reset":
                await session.see()
                await session.say("error", message="too long idle", code="SESSION_LOST", reason="expired")
                await session.hang_up()
                return
            await session.say("state")

    server = scripted(script)
    with VectorEnv(server.url, 2) as env:
        env.reset()
        server.wait_for(lambda: has_heard_all(env))
        assert lost(env) == ["expired", "expired"]


def test_a_refusal_that_came_before_any_request_is_raised(scripted: Callable[[Script], Any]) -> None:
    async def script(session: Session) -> None:
        await session.say("error", message="full", code="CAPACITY_REACHED", active_sessions=1, max_sessions=1)
        await session.hang_up()

    with pytest.raises(SessionCapacityError, match=r"full.*max_concurrent_envs"):
        VectorEnv(scripted(script).url, 3).connect()


def test_a_server_that_says_nothing_is_waited_for_and_not_forever(scripted: Callable[[Script], Any]) -> None:
    async def script(session: Session) -> None:
        while await session.receive():
            pass

    env: VectorEnv[Any, Any] = VectorEnv(scripted(script).url, 3, message_timeout_s=0.3)
    with pytest.raises(RequestTimeout, match="3 slots"):
        env.connect()
    env.close()


def test_a_server_that_hangs_up_at_once_is_not_tried_forever(scripted: Callable[[Script], Any]) -> None:
    async def script(session: Session) -> None:
        await session.hang_up()

    server = scripted(script)
    with pytest.raises(ConnectFailed):
        VectorEnv(server.url, 3, connect_timeout_s=0.5).connect()
    assert server.app.sockets < 100


@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_a_reset_that_kills_its_connection_is_tried_twice(scripted: Callable[[Script], Any], policy: Any) -> None:
    async def script(session: Session) -> None:
        while kind := await session.receive():
            if kind == "reset":
                await session.hang_up()
                return
            await session.say("state")

    server = scripted(script)
    with VectorEnv(server.url, 2, on_failure=policy) as env:
        with pytest.raises(SlotsFailed) as caught:
            env.reset()
        assert [type(error) for error in caught.value.errors.values()] == [SessionLost] * 2
        assert server.app.sockets == 4
