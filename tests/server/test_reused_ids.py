"""An id of protocol v2 stands for one request: sent again it gets the reply, given to another request an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

import environments
from environments import Counter, Sum
from openenv.protocol.codec import JSON, MSGPACK, Codec
from openenv.protocol.server_v2 import WRITERS
from openenv.server.app import create_fastapi_app
from openenv.server.ws_v2 import KEPT, KEPT_BYTES, RecentMessages
from openenv.types import State
from servers import Serve

RUNNERS = ["thread", "inline"]


class Add(environments.Add):
    label: str = ""


class Careless(Counter):
    """Changes its action: an environment may do what it likes with it."""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Sum:
        observation: Sum = super().step(action)
        action.amount = -1
        observation.reward = float(self.total)
        return observation

    @property
    def state(self) -> State:
        return State(step_count=self.total)


def ask(socket: ClientConnection, message: dict[str, Any]) -> dict[str, Any]:
    socket.send(json.dumps(message))
    return dict(json.loads(socket.recv(timeout=20)))


def step(session: str, request_id: int, **data: Any) -> dict[str, Any]:
    return {"type": "step", "id": request_id, "session": session, "data": data}


def batch(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"type": "batch", "id": 99, "requests": list(requests)}


def outcome(reply: dict[str, Any]) -> Any:
    return reply["data"]["code"] if reply["type"] == "error" else reply["data"]["observation"]["total"]


@pytest.fixture(params=RUNNERS)
def socket(request: pytest.FixtureRequest, serve: Serve) -> Any:
    app = create_fastapi_app(Careless, Add, Sum, max_concurrent_envs=8, runner=request.param)
    url = serve(app).url.replace("http", "ws", 1)
    with connect(f"{url}/ws", subprotocols=[JSON.name], proxy=None) as connection:  # type: ignore[list-item]
        yield connection


@pytest.fixture
def session(socket: ClientConnection) -> str:
    return str(ask(socket, {"type": "open", "id": 1})["session"])


def test_an_id_that_is_given_to_another_action_is_an_error_and_runs_nothing(
    socket: ClientConnection, session: str
) -> None:
    assert outcome(ask(socket, step(session, 1, amount=5))) == 5
    assert outcome(ask(socket, step(session, 1, amount=6))) == "VALIDATION_ERROR"
    assert outcome(ask(socket, step(session, 1, amount=5))) == 5
    assert outcome(ask(socket, step(session, 2, amount=1))) == 6


def test_the_same_holds_in_batches_and_between_them_and_single_requests(socket: ClientConnection, session: str) -> None:
    other = str(ask(socket, {"type": "open", "id": 2})["session"])
    replies = ask(socket, batch(step(session, 1, amount=5, label="a"), step(other, 1, amount=7)))["replies"]
    assert [outcome(reply) for reply in replies] == [5, 7]
    replies = ask(socket, batch(step(other, 1, amount=7), step(session, 1, amount=6)))["replies"]
    assert [outcome(reply) for reply in replies] == [7, "VALIDATION_ERROR"]
    reordered = {"data": {"label": "a", "amount": 5}, "session": session, "id": 1, "type": "step"}
    assert outcome(ask(socket, reordered)) == 5
    assert outcome(ask(socket, step(session, 1, amount=6))) == "VALIDATION_ERROR"


def test_a_request_may_be_repeated_without_naming_the_only_session(socket: ClientConnection, session: str) -> None:
    first = ask(socket, step(session, 1, amount=5))
    again = ask(socket, {"type": "step", "id": 1, "data": {"amount": 5}})
    assert again["data"] == first["data"]
    assert outcome(ask(socket, {"type": "step", "id": 1, "data": {"amount": 6}})) == "VALIDATION_ERROR"


def test_an_id_that_is_given_away_twice_in_one_batch_runs_once(socket: ClientConnection, session: str) -> None:
    replies = ask(socket, batch(step(session, 1, amount=5), step(session, 1, amount=6)))["replies"]
    assert [outcome(reply) for reply in replies] == [5, "VALIDATION_ERROR"]
    replies = ask(socket, batch(step(session, 2, amount=1), step(session, 2, amount=1)))["replies"]
    assert [outcome(reply) for reply in replies] == [6, 6]


def test_the_reply_is_kept_for_longer_than_the_question(socket: ClientConnection, session: str) -> None:
    assert outcome(ask(socket, step(session, 1, amount=5))) == 5
    for request_id in range(2, KEPT + 3):
        ask(socket, step(session, request_id, amount=0))
    assert outcome(ask(socket, step(session, 1, amount=5))) == 5


def test_a_reply_of_a_group_is_repeated_in_another_encoding(socket: ClientConnection) -> None:
    opened = ask(socket, {"type": "open", "id": 1})
    request = step(opened["session"], 1, amount=5)
    first = ask(socket, batch(request))["replies"][0]
    host, port = socket.remote_address[:2]
    with connect(f"ws://{host}:{port}/ws", subprotocols=[MSGPACK.name], proxy=None) as other:  # type: ignore[list-item]
        for message in ({"type": "open", "id": 1, "resume": opened["token"]}, request):
            other.send(MSGPACK.encode(message))
            reply = MSGPACK.decode(other.recv(timeout=20), binary=True)  # type: ignore[arg-type]
    assert reply == first


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_messages_are_distinguished_by_what_they_ask_and_only_while_they_are_kept(codec: Codec) -> None:
    recent = RecentMessages(WRITERS[codec])

    def add(message: Any) -> Any:
        return recent.add(codec.encode(message), codec.is_binary)

    first = add(step("a", 1, amount=5))
    assert not first.differs(add({**step("a", 1, amount=5), "traceparent": "00-1"}), 1, "a")
    assert first.differs(add({**step("a", 1, amount=5), "timeout_s": 2.0}), 1, "a")
    assert not first.differs(add(step("b", 1, amount=6)), 1, "a")
    assert not first.differs(add(step("a", 1, amount=6)), 1, "a")  # one too many: the first is no longer kept


def test_a_large_message_is_not_kept() -> None:
    recent = RecentMessages(WRITERS[JSON])
    first = recent.add(JSON.encode(step("a", 1, label="x" * KEPT_BYTES)), False)
    assert not first.differs(recent.add(JSON.encode(step("a", 1, label="y" * KEPT_BYTES)), False), 1, "a")


def test_a_message_with_strange_parts_is_looked_into_all_the_same() -> None:
    recent = RecentMessages(WRITERS[JSON])
    strange = [7, None, {"type": "step", "id": [1]}, {"type": "step", "id": 1, "session": {}}, step("a", 1, amount=1)]
    first = recent.add(JSON.encode({"type": "batch", "id": 1, "requests": strange}), False)
    assert first.differs(recent.add(JSON.encode(step("a", 1, amount=2)), False), 1, "a")
