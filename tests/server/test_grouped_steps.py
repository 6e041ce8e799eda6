"""Steps of one batch whose sessions share a thread run together: each is still its own request, with its own outcome,
its own place in the ledger, and can be cancelled, closed or repeated by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from socket import SHUT_RDWR
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from environments import Add, Counter, Sum
from openenv.server.app import create_fastapi_app
from servers import Serve

SOON = 10.0
RUNNERS = ["thread", "inline"]


class Where(Sum):
    """The total, and the thread that added it up."""

    thread: str = ""


class OneThread(Counter):
    """Adds up in one thread for all sessions, so that all of a batch goes together."""

    REQUIRES_SINGLE_THREAD_EXECUTOR = True

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Where:
        return Where(thread=threading.current_thread().name, **super().step(action).model_dump())


class Peer:
    """A client with sessions, which sends exactly what a test writes."""

    def __init__(self, connection: ClientConnection, count: int) -> None:
        self.connection = connection
        self.opened = [self.ask(type="open", id=number + 1) for number in range(count)]
        self.sessions: list[str] = [opened["session"] for opened in self.opened]

    def send(self, **message: Any) -> None:
        self.connection.send(json.dumps(message))

    def take(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=SOON))
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(**message)
        return self.take()

    def steps(self, request_id: int, *actions: dict[str, Any]) -> list[dict[str, Any]]:
        """Make a step for each session, all with the same id."""
        return [
            {"type": "step", "id": request_id, "session": session, "data": action}
            for session, action in zip(self.sessions, actions, strict=True)
        ]


Dial = Callable[..., Peer]


@pytest.fixture
def dial(serve: Serve) -> Iterator[Dial]:
    """Serve the environment and connect to it."""
    opened: list[ClientConnection] = []
    served: dict[str, Any] = {}

    def dial(runner: str = "thread", count: int = 3, resumed: bool = False) -> Peer:
        if runner not in served:
            application = create_fastapi_app(OneThread, Add, Where, max_concurrent_envs=16, runner=runner)
            served[runner] = serve(application)
        url = f"ws://127.0.0.1:{served[runner].port}/ws"
        connection = connect(url, subprotocols=["openenv.v2.json"], proxy=None).__enter__()  # type: ignore[list-item]
        opened.append(connection)
        return Peer(connection, 0 if resumed else count)

    Counter.entered.clear()
    Counter.gate.clear()
    yield dial
    Counter.gate.set()
    for connection in opened:
        connection.close()


def totals(message: dict[str, Any]) -> list[Any]:
    """What each reply of a batch says: a total, or the code of an error."""
    assert message["type"] == "batch", message
    return [
        reply["data"]["observation"]["total"] if reply["type"] == "observation" else reply["data"]["code"]
        for reply in message["replies"]
    ]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_reset_among_steps_is_answered_in_its_place(dial: Dial, runner: str) -> None:
    peer = dial(runner)
    peer.ask(type="batch", id=1, requests=peer.steps(1, {"amount": 1}, {"amount": 2}, {"amount": 3}))
    first, second, third = peer.steps(2, {"amount": 1}, {"amount": 2}, {"amount": 3})
    reset = {"type": "reset", "id": 2, "session": peer.sessions[1], "data": {}}
    after = {**second, "id": 3}  # of the same session: it must not overtake the reset
    reply = peer.ask(type="batch", id=2, requests=[first, reset, after, third])
    assert totals(reply) == [2, 0, 2, 6]
    assert [(one["id"], one["session"]) for one in reply["replies"]] == [
        (2, peer.sessions[0]), (2, peer.sessions[1]), (3, peer.sessions[1]), (2, peer.sessions[2]),
    ]  # fmt: skip


@pytest.mark.parametrize("runner", RUNNERS)
def test_each_step_has_its_own_outcome(dial: Dial, runner: str) -> None:
    peer = dial(runner)
    reply = peer.ask(type="batch", id=1, requests=peer.steps(1, {"amount": 1}, {"fail": True}, {"amount": 3}))
    assert totals(reply) == [1, "EXECUTION_ERROR", 3]
    assert [(one["id"], one["session"]) for one in reply["replies"]] == [(1, session) for session in peer.sessions]
    reply = peer.ask(type="batch", id=2, requests=peer.steps(2, {"amount": 1}, {"amount": 2}, {"amount": 3}))
    assert totals(reply) == [2, 2, 6]
    assert len({one["data"]["observation"]["thread"] for one in reply["replies"]}) == 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_repeated_batch_is_answered_and_not_run(dial: Dial, runner: str) -> None:
    peer = dial(runner)
    requests = peer.steps(1, {}, {"fail": True}, {})
    first = peer.ask(type="batch", id=1, requests=requests)
    again = peer.ask(type="batch", id=2, requests=requests)
    assert again["replies"] == first["replies"]
    assert totals(peer.ask(type="batch", id=3, requests=peer.steps(2, {}, {}, {}))) == [2, 1, 2]


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_cannot_go_along_runs_by_itself_in_the_same_batch(dial: Dial, runner: str) -> None:
    peer = dial(runner)
    step = {"type": "step", "id": 1, "session": peer.sessions[0], "data": {"amount": 5}}
    requests = [
        step,
        step,  # the same request twice
        {**step, "id": 2},  # the session's next one
        {**step, "session": peer.sessions[1], "timeout_s": 3.0},
        {**step, "session": peer.sessions[2], "kwargs": {"note": "x"}},
        {**step, "session": "nobody's"},
    ]
    assert totals(peer.ask(type="batch", id=1, requests=requests)) == [5, 5, 10, 5, 5, "SESSION_NOT_FOUND"]


def test_an_empty_batch_is_answered(dial: Dial) -> None:
    peer = dial()
    assert peer.ask(type="batch", id=1, requests=[])["replies"] == []


def test_a_step_that_waits_its_turn_can_be_cancelled(dial: Dial) -> None:
    peer = dial()
    peer.send(type="batch", id=1, requests=peer.steps(1, {"wait": True}, {}, {}))
    assert Counter.entered.wait(SOON)
    assert peer.ask(type="cancel", id=9, session=peer.sessions[1], request=1)["found"] is True
    assert peer.ask(type="cancel", id=10, session=peer.sessions[1], request=7)["found"] is False
    Counter.gate.set()
    assert totals(peer.take()) == [1, "CANCELLED", 1]
    assert totals(peer.ask(type="batch", id=2, requests=peer.steps(2, {}, {}, {}))) == [2, 1, 2]


def test_a_session_that_is_closed_before_its_turn_says_so_and_the_others_go_on(dial: Dial) -> None:
    peer = dial()
    peer.send(type="batch", id=1, requests=peer.steps(1, {"wait": True}, {}, {}))
    assert Counter.entered.wait(SOON)
    assert peer.ask(type="close", id=2, session=peer.sessions[1])["type"] == "closed"
    Counter.gate.set()
    assert totals(peer.take()) == [1, "SESSION_LOST", 1]


def test_requests_that_come_during_a_group_follow_it(dial: Dial) -> None:
    peer = dial()
    peer.send(type="batch", id=1, requests=peer.steps(1, {"wait": True}, {}, {}))
    assert Counter.entered.wait(SOON)
    peer.send(type="step", id=2, session=peer.sessions[0], data={"amount": 10})
    peer.send(type="batch", id=3, requests=peer.steps(3, {}, {}, {}))
    Counter.gate.set()
    replies = [peer.take() for _ in range(3)]
    assert totals(replies[0]) == [1, 1, 1]
    assert replies[1]["data"]["observation"]["total"] == 11
    assert totals(replies[2]) == [12, 2, 2]


def test_a_client_that_returns_during_a_group_gets_the_replies(dial: Dial) -> None:
    peer = dial()
    requests = peer.steps(1, {"wait": True}, {}, {})
    peer.send(type="batch", id=1, requests=requests)
    assert Counter.entered.wait(SOON)
    peer.connection.socket.shutdown(SHUT_RDWR)  # a thread may be reading: closing alone would end nothing yet
    other = dial(resumed=True)
    for number, opened in enumerate(peer.opened):
        assert other.ask(type="open", id=number + 1, resume=opened["token"])["resumed"] is True
    other.send(type="batch", id=9, requests=requests)
    assert other.ask(type="cancel", id=10, session=peer.sessions[0], request=7)["found"] is False  # the batch was read
    Counter.gate.set()
    assert totals(other.take()) == [1, 1, 1]


def test_the_sessions_are_free_afterwards(dial: Dial) -> None:
    peer = dial()
    for number in range(1, 6):
        peer.ask(type="batch", id=number, requests=peer.steps(number, {}, {"fail": True}, {}))
    states = [peer.ask(type="state", id=20, session=session) for session in peer.sessions]
    assert {reply["type"] for reply in states} == {"state"}
    for session in peer.sessions:
        assert peer.ask(type="close", id=30, session=session)["type"] == "closed"
