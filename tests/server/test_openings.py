"""An `open` that is repeated under its nonce, on whichever connection, gets the session of the first one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from socket import SHUT_RDWR
from typing import Any

import httpx2
import pytest
from websockets.sync.client import ClientConnection, connect

from environments import Idle
from openenv.server.access import AccessPolicy
from openenv.server.app import HTTPEnvServer, new_application
from openenv.server.sessions.lifetime import SessionLimits
from openenv.types import Action, Observation
from servers import Serve

NONCE = "a-nonce-that-nobody-guesses"


class Slow(Idle):
    """Is built when a test opens its gate, and counts how often."""

    built = 0
    gate = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        type(self).built += 1
        self.gate.wait(10)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        if kwargs.get("fail"):
            raise ValueError("no level")
        return Observation(metadata={"seed": seed})


@pytest.fixture
def env_cls() -> Iterator[type[Slow]]:
    """The environment, with a gate and a counter of its own."""
    gate = threading.Event()
    gate.set()
    yield type("OwnSlow", (Slow,), {"gate": gate, "built": 0})
    gate.set()


@pytest.fixture
def start(serve: Serve, env_cls: Any) -> Callable[..., Any]:
    """Serve it under limits."""

    def start(access: AccessPolicy | None = None, **limits: Any) -> Any:
        server = HTTPEnvServer(
            env_cls, Action, Observation, limits=SessionLimits(**{"sessions": 2, **limits}), access=access
        )
        app = new_application()
        app.state.openenv_server = server
        server.register_routes(app)
        return serve(app)

    return start


class Peer:
    """A client that sends exactly what a test writes."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def send(self, **message: Any) -> None:
        self._connection.send(json.dumps(message))

    def take(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(timeout=10))
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(**message)
        return self.take()

    def cut(self) -> None:
        """Cut the connection without a close frame."""
        self._connection.socket.shutdown(SHUT_RDWR)  # a thread may be reading: closing alone would end nothing yet

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


@pytest.fixture
def dial() -> Iterator[Callable[..., Peer]]:
    """Connect to a server in protocol v2."""
    made: list[Peer] = []

    def dial(server: Any, token: str | None = None) -> Peer:
        headers = {"Authorization": f"Bearer {token}"} if token else None
        url = f"ws://127.0.0.1:{server.port}/ws"
        offered: Any = ["openenv.v2.json"]
        dialled = connect(url, subprotocols=offered, additional_headers=headers, proxy=None)
        made.append(Peer(dialled.__enter__()))
        return made[-1]

    yield dial
    for peer in made:
        peer.close()


def test_a_repeated_open_gets_the_same_session_on_another_connection(start: Any, dial: Any) -> None:
    server = start()
    first, second = dial(server), dial(server)
    one = first.ask(type="open", id=1, nonce=NONCE)
    again = second.ask(type="open", id=1, nonce=NONCE)
    assert {**again, "id": 1} == one
    assert first.take()["event"] == "detached"
    assert second.ask(type="reset", id=1)["type"] == "observation"
    assert server.manager.active == 1


def test_a_session_whose_opened_was_lost_can_be_had_for_the_grace_period(start: Any, dial: Any) -> None:
    server = start(sessions=1, grace_s=30)
    first = dial(server)
    one = first.ask(type="open", id=1, nonce=NONCE)
    first.cut()
    server.wait_for(lambda: not server.manager.sessions()[0].is_attached)
    assert dial(server).ask(type="open", id=7, nonce=NONCE)["session"] == one["session"]


def test_a_client_that_returns_during_construction_gets_that_session(start: Any, dial: Any, env_cls: Any) -> None:
    server = start(sessions=1)
    env_cls.gate.clear()
    first = dial(server)
    first.send(type="open", id=1, nonce=NONCE)
    server.wait_for(lambda: env_cls.built == 1)
    first.cut()
    second = dial(server)
    second.send(type="open", id=1, nonce=NONCE)
    second.ask(type="ping", id=2)
    env_cls.gate.set()
    assert second.take()["type"] == "opened"
    assert (env_cls.built, server.manager.active) == (1, 1)


def test_two_connections_that_ask_at_once_share_the_session_and_the_later_one_has_it(
    start: Any, dial: Any, env_cls: Any
) -> None:
    server = start()
    env_cls.gate.clear()
    first, second = dial(server), dial(server)
    for peer in (first, second):
        peer.send(type="open", id=1, nonce=NONCE)
        assert peer.ask(type="ping", id=2)["type"] == "pong"
    env_cls.gate.set()
    opened = [peer.take() for peer in (first, second)]
    assert opened[0]["session"] == opened[1]["session"]
    assert first.take()["event"] == "detached"
    assert second.ask(type="state", id=1)["type"] == "state"
    assert env_cls.built == 1


def test_a_client_that_leaves_the_queue_loses_its_place_and_no_more(start: Any, dial: Any) -> None:
    server = start(sessions=1)
    holder = dial(server)
    holder.ask(type="open", id=1)
    first, second = dial(server), dial(server)
    assert first.ask(type="open", id=1, nonce=NONCE, wait_s=20)["event"] == "queued"
    assert second.ask(type="open", id=1, nonce=NONCE, wait_s=20)["event"] == "queued"
    assert len(server.manager.queue) == 1  # one place for one session
    first.cut()
    holder.send(type="close", id=1)
    assert second.take()["type"] == "opened"
    assert server.manager.active == 1


def test_a_queue_without_waiters_is_removed(start: Any, dial: Any) -> None:
    server = start(sessions=1)
    holder, waiting = dial(server), dial(server)
    holder.ask(type="open", id=1)
    assert waiting.ask(type="open", id=1, nonce=NONCE, wait_s=20)["event"] == "queued"
    waiting.cut()
    server.wait_for(lambda: not server.manager.queue)


def test_an_open_that_is_cancelled_ends_what_is_built_and_may_be_asked_again(
    start: Any, dial: Any, env_cls: Any
) -> None:
    server = start()
    env_cls.gate.clear()
    peer = dial(server)
    peer.send(type="open", id=1, nonce=NONCE)
    server.wait_for(lambda: env_cls.built == 1)
    peer.send(type="cancel", id=2, request=1)
    assert {peer.take()["type"], peer.take()["type"]} == {"cancelled", "error"}
    env_cls.gate.set()
    assert peer.ask(type="open", id=3, nonce=NONCE)["type"] == "opened"
    server.wait_for(lambda: server.manager.active == 1)
    assert env_cls.built == 2


def test_a_client_that_closes_while_its_session_is_built_leaves_none(start: Any, dial: Any, env_cls: Any) -> None:
    server = start(grace_s=600)
    env_cls.gate.clear()
    peer = dial(server)
    peer.send(type="open", id=1, nonce=NONCE)
    server.wait_for(lambda: env_cls.built == 1)
    peer.close()
    env_cls.gate.set()
    server.wait_for(lambda: server.manager.active == 0)


def test_a_session_that_was_built_for_a_client_that_left_ends_with_the_grace_period(
    start: Any, dial: Any, env_cls: Any
) -> None:
    server = start(grace_s=0.3)
    env_cls.gate.clear()
    peer = dial(server)
    peer.send(type="open", id=1, nonce=NONCE)
    server.wait_for(lambda: env_cls.built == 1)
    peer.cut()
    env_cls.gate.set()
    server.wait_for(lambda: server.manager.active == 0)


def test_the_nonce_of_a_session_that_has_ended_opens_no_other(start: Any, dial: Any) -> None:
    server = start()
    first, second = dial(server), dial(server)
    first.ask(type="open", id=1, nonce=NONCE)
    first.ask(type="close", id=1)
    refused = second.ask(type="open", id=1, nonce=NONCE)
    assert (refused["data"]["code"], refused["data"]["reason"]) == ("SESSION_LOST", "closed")


def test_without_a_grace_period_nothing_is_kept_for_a_nonce(start: Any, dial: Any) -> None:
    server = start(grace_s=0)
    first = dial(server)
    one = first.ask(type="open", id=1, nonce=NONCE)
    first.cut()
    server.wait_for(lambda: server.manager.active == 0)
    assert dial(server).ask(type="open", id=1, nonce=NONCE)["session"] != one["session"]


@pytest.mark.parametrize("nonce", ["short", "x" * 129, 7])
def test_a_nonce_that_can_be_guessed_is_refused(start: Any, dial: Any, nonce: Any) -> None:
    assert dial(start()).ask(type="open", id=1, nonce=nonce)["data"]["code"] == "VALIDATION_ERROR"


def test_options_of_open_that_are_not_known_are_ignored(start: Any, dial: Any) -> None:
    assert dial(start()).ask(type="open", id=1, later_versions="say more")["type"] == "opened"


def test_an_agent_cannot_have_an_orchestrators_session_by_its_nonce(start: Any, dial: Any) -> None:
    server = start(AccessPolicy(orchestrator="trainer-token", agent="agent-token"))
    one = dial(server, "trainer-token").ask(type="open", id=1, nonce=NONCE)
    assert dial(server, "agent-token").ask(type="open", id=1, nonce=NONCE)["session"] != one["session"]


# -- the same over HTTP ---------------------------------------------------------------------------------------------


@pytest.fixture
def http(start: Any) -> Iterator[httpx2.Client]:
    """A client of a server with two slots."""
    with httpx2.Client(base_url=start().url, trust_env=False, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", ["/sessions", "/reset"])
def test_over_http_a_repeated_key_gets_the_same_session(http: httpx2.Client, path: str) -> None:
    headers = {"Idempotency-Key": NONCE, "X-OpenEnv-Session": "new"}
    first, again = (http.post(path, headers=headers) for _ in range(2))
    assert first.status_code == again.status_code == (201 if path == "/sessions" else 200)
    assert first.headers["X-OpenEnv-Session"] == again.headers["X-OpenEnv-Session"]
    assert first.content == again.content
    other = http.post(path, headers={**headers, "Idempotency-Key": NONCE + "2"})
    assert other.headers["X-OpenEnv-Session"] != first.headers["X-OpenEnv-Session"]


@pytest.mark.parametrize("path", ["/sessions", "/reset"])
def test_over_http_too_a_key_that_can_be_guessed_opens_nothing(http: httpx2.Client, path: str) -> None:
    refused = http.post(path, headers={"Idempotency-Key": "1", "X-OpenEnv-Session": "new"})
    assert refused.status_code == 422
    assert "guess" in refused.text


def test_a_first_reset_that_fails_keeps_no_session(http: httpx2.Client, start: Any) -> None:
    headers = {"Idempotency-Key": NONCE, "X-OpenEnv-Session": "new"}
    assert http.post("/reset", json={"fail": True}, headers=headers).status_code == 500
    again = http.post("/reset", json={"fail": True}, headers=headers)
    assert (again.status_code, again.json()["code"]) == (410, "SESSION_LOST")
