"""Several requests of one session in a batch run in the order they stand in, whatever each of them brings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from environments import Add, Counter, Sum
from openenv.server.app import HTTPEnvServer, new_application
from openenv.server.sessions.lifetime import SessionLimits
from servers import Serve


class Adder(Counter):
    """Has the amounts as the digits of its total, in the order they came."""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Sum:
        self.total *= 10
        return super().step(action)


@pytest.fixture
def peer(serve: Serve) -> Iterator[ClientConnection]:
    app = new_application()
    app.state.openenv_server = HTTPEnvServer(Adder, Add, Sum, limits=SessionLimits(sessions=4))
    app.state.openenv_server.register_routes(app)
    Adder.gate.clear()
    with ExitStack() as stack:
        address = f"ws://127.0.0.1:{serve(app).port}/ws"
        yield stack.enter_context(connect(address, subprotocols=["openenv.v2.json"], proxy=None))  # type: ignore[list-item]
        Adder.gate.set()


def ask(peer: ClientConnection, **message: Any) -> dict[str, Any]:
    peer.send(json.dumps(message))
    answer: dict[str, Any] = json.loads(peer.recv(timeout=30))
    return answer


def totals(answer: dict[str, Any]) -> list[Any]:
    return [reply["data"].get("observation", reply["data"]).get("total", reply["data"]) for reply in answer["replies"]]


def test_a_step_with_a_time_limit_comes_before_the_plain_ones_after_it(peer: ClientConnection) -> None:
    name = ask(peer, type="open", id=1)["session"]
    steps = [
        {"type": "step", "id": 1, "session": name, "data": {"amount": 1}},
        {"type": "step", "id": 2, "session": name, "data": {"amount": 2}, "timeout_s": 5.0},
        {"type": "step", "id": 3, "session": name, "data": {"amount": 3}},
        {"type": "step", "id": 4, "session": name, "data": {"amount": 4}, "kwargs": {}},
    ]
    assert totals(ask(peer, type="batch", id=2, requests=steps)) == [1, 12, 123, 1234]
    others = [{**step, "id": step["id"] + 10} for step in reversed(steps)]
    for number, step in enumerate(others, 11):
        step["id"] = number
    assert totals(ask(peer, type="batch", id=3, requests=others)) == [12344, 123443, 1234432, 12344321]


def test_a_step_that_finds_its_session_busy_comes_before_the_ones_after_it(peer: ClientConnection) -> None:
    name, other = (ask(peer, type="open", id=number)["session"] for number in (1, 2))
    peer.send(json.dumps({"type": "step", "id": 1, "session": name, "data": {"amount": 1, "wait": True}}))
    steps = [
        {"type": "step", "id": number, "session": where, "data": {"amount": number}}
        for number in range(2, 9)
        for where in (name, other)
    ]
    peer.send(json.dumps({"type": "batch", "id": 3, "requests": steps}))
    Adder.gate.set()
    assert json.loads(peer.recv(timeout=30))["id"] == 1
    found = totals(json.loads(peer.recv(timeout=30)))
    assert found[0::2] == [int("12345678"[: count + 2]) for count in range(7)]
    assert found[1::2] == [int("2345678"[: count + 1]) for count in range(7)]


@pytest.mark.parametrize("extra", [{"kwargs": {}}, {"timeout_s": 5.0}, {}], ids=["keywords", "a time limit", "nothing"])
def test_a_step_that_names_no_session_is_the_only_ones(peer: ClientConnection, extra: dict[str, Any]) -> None:
    name = ask(peer, type="open", id=1)["session"]
    steps = [
        {"type": "step", "id": 1, "data": {"amount": 1}, **extra},
        {"type": "step", "id": 2, "data": {"amount": 2}, "session": name},
        {"type": "step", "id": 3, "data": {"amount": 3}},
    ]
    assert totals(ask(peer, type="batch", id=2, requests=steps)) == [1, 12, 123]
