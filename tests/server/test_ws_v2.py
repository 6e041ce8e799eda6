"""Protocol v2 on `/ws`: many sessions on one connection, replies by id, sessions that survive their connection."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from socket import SHUT_RDWR
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from environments import Add, Counter, Sum
from openenv.protocol.codec import MSGPACK
from openenv.server.app import HTTPEnvServer, create_fastapi_app, new_application
from openenv.server.sessions.lifetime import SessionLimits
from servers import Serve
from slow_steps import take_async

JSON = "openenv.v2.json"
PACKED = "openenv.v2.msgpack"


class Slow(Counter):
    """A coroutine, which can be cancelled."""

    async def step_async(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Sum:
        await take_async(action.pause_s)
        return super().step(Add(amount=action.amount))


class Peer:
    """A client that sends exactly what a test writes."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, **message: Any) -> None:
        self.connection.send(json.dumps(message))

    def take(self, timeout_s: float = 10.0) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=timeout_s))
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(**message)
        return self.take()

    def cut(self) -> None:
        """Cut the connection without a close frame."""
        self.connection.socket.shutdown(SHUT_RDWR)  # a thread may be reading: closing alone would end nothing yet

    def open(self, request_id: int = 1, **options: Any) -> dict[str, Any]:
        return self.ask(type="open", id=request_id, **options)


Dial = Callable[..., Peer]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Connect to a server in protocol v2."""
    opened: list[ClientConnection] = []

    def dial(server: Any, subprotocol: str = JSON) -> Peer:
        manager = connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=[subprotocol], proxy=None)  # type: ignore[list-item]
        connection = manager.__enter__()
        opened.append(connection)
        assert connection.subprotocol == subprotocol
        return Peer(connection)

    yield dial
    for connection in opened:
        connection.close()


def app(env: type[Any] = Counter, **limits: Any) -> Any:
    server = HTTPEnvServer(env, Add, Sum, limits=SessionLimits(**{"sessions": 8, **limits}))
    application = new_application()
    application.state.openenv_server = server
    server.register_routes(application)
    return application


def total(reply: dict[str, Any]) -> int:
    assert reply["type"] == "observation", reply
    found: int = reply["data"]["observation"]["total"]
    return found


def code(reply: dict[str, Any]) -> str:
    assert reply["type"] == "error", reply
    found: str = reply["data"]["code"]
    return found


def test_a_client_that_offers_nothing_speaks_v1(serve: Serve) -> None:
    server = serve(app())
    with connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None) as connection:
        assert connection.subprotocol is None
        connection.send('{"type": "reset"}')
        assert json.loads(connection.recv(timeout=10))["type"] == "observation"


def test_a_request_is_answered_by_a_message_with_its_id(serve: Serve, dial: Dial) -> None:
    peer = dial(serve(app()))
    opened = peer.open()
    assert (opened["type"], opened["resumed"], opened["last_id"]) == ("opened", False, 0)
    assert total(peer.ask(type="reset", id=1, data={"seed": 5})) == 5
    reply = peer.ask(type="step", id=2, data={"amount": 2}, timeout_s=3.5, kwargs={"note": "x"})
    assert (reply["id"], total(reply), reply["data"]["reward"]) == (2, 7, 2.0)
    assert reply["data"]["metadata"] == {"timeout_s": 3.5, "note": "x"}
    assert peer.ask(type="state", id=3)["data"]["step_count"] == 1
    assert peer.ask(type="ping", id=9) == {"type": "pong", "id": 9}


def test_one_connection_holds_many_sessions(serve: Serve, dial: Dial) -> None:
    peer = dial(serve(app()))
    first, second = peer.open(1)["session"], peer.open(2)["session"]
    assert code(peer.ask(type="reset", id=1)) == "SESSION_NOT_FOUND"  # which of the two?
    for session, seed in ((first, 10), (second, 20)):
        reply = peer.ask(type="reset", id=1, session=session, data={"seed": seed})
        assert (reply["session"], total(reply)) == (session, seed)
    requests = [
        {"type": "step", "id": 2, "session": first, "data": {"amount": 1}},
        {"type": "step", "id": 2, "session": second, "data": {"amount": 2}},
        {"type": "step", "id": 3, "session": second, "data": {"amount": "many"}},
        {"type": "state", "id": 4, "session": second},
        {"type": "open", "id": 5},
    ]
    reply = peer.ask(type="batch", id=7, requests=requests)
    assert (reply["type"], reply["id"]) == ("batch", 7)
    one, two, wrong, state, misplaced = reply["replies"]
    assert (total(one), total(two)) == (11, 22)
    assert (code(wrong), code(misplaced)) == ("VALIDATION_ERROR", "VALIDATION_ERROR")
    assert state["data"]["step_count"] == 1


def test_the_replies_of_a_batch_may_come_one_by_one(serve: Serve, dial: Dial) -> None:
    peer = dial(serve(app()))
    sessions = [peer.open(number)["session"] for number in (1, 2)]
    requests = [
        {"type": "step", "id": 1, "session": sessions[0], "data": {"pause_s": 1.0}},
        {"type": "step", "id": 1, "session": sessions[1], "data": {}},
    ]
    peer.send(type="batch", id=3, each=True, requests=requests)
    order = [reply["session"] for _ in range(2) for reply in peer.take()["replies"]]
    assert order == [sessions[1], sessions[0]]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"id": 1}, "UNKNOWN_TYPE"),
        ({"type": "dance", "id": 1}, "UNKNOWN_TYPE"),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
        ({"type": "step", "id": "one", "data": {}}, "VALIDATION_ERROR"),
        ({"type": "step", "id": True, "data": {}}, "VALIDATION_ERROR"),
        ({"type": "step", "id": 1}, "VALIDATION_ERROR"),
        ({"type": "step", "id": 1, "data": {}, "surprise": 1}, "VALIDATION_ERROR"),
        ({"type": "step", "id": 1, "data": {}, "timeout_s": -1}, "VALIDATION_ERROR"),
        ({"type": "reset", "id": 1, "data": [1]}, "VALIDATION_ERROR"),
        ({"type": "batch", "id": 1, "requests": 5}, "VALIDATION_ERROR"),
        ({"type": "step", "id": 1, "session": "nobody", "data": {}}, "SESSION_NOT_FOUND"),
        ({"type": "open", "id": 1, "resume": "nonsense"}, "SESSION_LOST"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_lives(
    serve: Serve, dial: Dial, message: dict[str, Any], expected: str
) -> None:
    peer = dial(serve(app()))
    peer.open()
    assert code(peer.ask(**message)) == expected
    peer.connection.send("not json")
    assert (reply := peer.take())["id"] is None
    assert code(reply) == "INVALID_JSON"
    assert total(peer.ask(type="step", id=1, data={"amount": 3})) == 3


def test_a_repeated_request_is_answered_and_not_run_again(serve: Serve, dial: Dial) -> None:
    peer = dial(serve(app()))
    peer.open()
    first = peer.ask(type="step", id=1, data={"amount": 2})
    assert peer.ask(type="step", id=1, data={"amount": 2}) == first
    failed = peer.ask(type="step", id=2, data={"fail": True})
    assert code(failed) == "EXECUTION_ERROR"
    assert peer.ask(type="step", id=2, data={"fail": True}) == failed
    for request_id in range(3, 40):
        peer.ask(type="step", id=request_id, data={"amount": 0})
    stale = peer.ask(type="step", id=1, data={"amount": 2})
    assert (code(stale), stale["data"]["last_id"]) == ("STALE_REQUEST", 39)
    assert total(peer.ask(type="step", id=40, data={"amount": 0})) == 2


def test_an_open_that_is_sent_twice_opens_one_session(serve: Serve, dial: Dial) -> None:
    server = serve(app())
    peer = dial(server)
    peer.send(type="open", id=1)
    peer.send(type="open", id=1)  # before the first is answered
    opened = peer.take()
    peer.send(type="open", id=1)  # and after
    answers = [peer.ask(type="step", id=1, data={"amount": 2})]
    while answers[-1]["type"] == "opened":  # the second one too has an answer of its own if the first was quick
        answers.append(peer.take())
    assert [answer == opened for answer in answers[:-1]] in ([True], [True, True])
    assert total(answers[-1]) == 2
    assert len(server.manager.sessions()) == 1
    peer.ask(type="close", id=2)
    assert code(peer.open(1)) == "STALE_REQUEST"
    assert peer.open(2)["session"] != opened["session"]


def test_a_session_survives_its_connection(serve: Serve, dial: Dial) -> None:
    server = serve(app())
    peer = dial(server)
    token = peer.open()["token"]
    peer.ask(type="reset", id=1, data={"seed": 1})
    peer.send(type="step", id=2, data={"amount": 5, "pause_s": 1.0})
    server.wait_for(lambda: any(not session.is_idle for session in server.manager.sessions()))
    peer.cut()
    other = dial(server)
    opened = other.open(resume=token)
    assert (opened["resumed"], opened["last_id"]) == (True, 2)
    assert total(other.ask(type="step", id=2, data={"amount": 5, "pause_s": 1.0})) == 6
    assert other.ask(type="state", id=3)["data"]["step_count"] == 1


def test_the_last_connection_to_attach_has_the_session(serve: Serve, dial: Dial) -> None:
    server = serve(app())
    first, second = dial(server), dial(server)
    opened = first.open()
    assert second.open(resume=opened["token"])["resumed"]
    event = first.take()
    assert (event["event"], event["session"]) == ("detached", opened["session"])
    assert code(first.ask(type="state", id=1, session=opened["session"])) == "SESSION_NOT_FOUND"
    first.cut()
    assert second.ask(type="state", id=1)["type"] == "state"


@pytest.mark.parametrize("ending", ["closed", "expired"])
def test_a_session_that_has_ended_is_reported_with_the_reason(serve: Serve, dial: Dial, ending: str) -> None:
    server = serve(app(grace_s=0.2))
    peer = dial(server)
    token = peer.open()["token"]
    if ending == "closed":
        assert peer.ask(type="close", id=1)["type"] == "closed"
    else:
        peer.cut()
    server.wait_for(lambda: not server.manager.sessions())
    lost = dial(server).open(resume=token)
    assert (code(lost), lost["data"]["reason"]) == ("SESSION_LOST", ending)


def test_a_token_of_another_server_process_is_a_lost_session(serve: Serve, dial: Dial) -> None:
    token = dial(serve(app())).open()["token"]
    lost = dial(serve(app())).open(resume=token)
    assert (code(lost), lost["data"]["reason"]) == ("SESSION_LOST", "server restarted")


def test_a_wrong_secret_opens_nothing(serve: Serve, dial: Dial) -> None:
    server = serve(app())
    token = dial(server).open()["token"]
    boot, session, _ = token.split(".")
    for guess in (f"{boot}.{session}.wrong", f"{boot}.{session}.", f"{boot}.{session}", boot):
        assert code(dial(server).open(resume=guess)) == "SESSION_LOST"


def test_the_grace_period_can_be_switched_off(serve: Serve, dial: Dial) -> None:
    server = serve(app(grace_s=0))
    peer = dial(server)
    token = peer.open()["token"]
    peer.cut()
    server.wait_for(lambda: not server.manager.sessions())
    assert code(dial(server).open(resume=token)) == "SESSION_LOST"


def test_a_running_request_can_be_cancelled(serve: Serve, dial: Dial) -> None:
    peer = dial(serve(app(Slow)))
    peer.open()
    peer.send(type="step", id=1, data={"pause_s": 60})
    peer.send(type="step", id=2, data={"pause_s": 60})
    peer.send(type="cancel", id=5, request=2)
    peer.send(type="cancel", id=6, request=1)
    peer.send(type="cancel", id=7, request=99)
    answers = {(message["type"], message["id"]): message for message in (peer.take() for _ in range(5))}
    assert [answers[("cancelled", number)]["found"] for number in (5, 6, 7)] == [True, True, False]
    assert {code(answers[("error", number)]) for number in (1, 2)} == {"CANCELLED"}
    assert total(peer.ask(type="step", id=3, data={"amount": 1})) == 1


def test_clients_that_wait_for_a_slot_are_served_in_order(serve: Serve, dial: Dial) -> None:
    server = serve(app(sessions=1))
    holder = dial(server)
    holder.open()
    refused = dial(server).open()
    assert (code(refused), refused["data"]["retry_after_s"]) == ("CAPACITY_REACHED", 1.0)
    waiting = [dial(server) for _ in range(3)]
    for place, peer in enumerate(waiting, 1):
        event = peer.open(wait_s=30)
        assert (event["type"], event["event"], event["position"]) == ("event", "queued", place)
    assert code(dial(server).open()) == "CAPACITY_REACHED"  # a newcomer does not overtake those who wait
    holder.ask(type="close", id=1)
    for peer in waiting:
        while (message := peer.take())["type"] == "event":
            assert message["event"] == "queued"
        assert message["type"] == "opened"
        assert len(server.manager.sessions()) == 1
        peer.ask(type="close", id=1)


def test_a_wait_has_an_end_and_can_be_given_up(serve: Serve, dial: Dial) -> None:
    server = serve(app(sessions=1, queue=2))
    dial(server).open()
    hurried, patient, late = dial(server), dial(server), dial(server)
    patient.open(wait_s=60)
    hurried.open(wait_s=1.5)
    assert code(late.open(wait_s=60)) == "CAPACITY_REACHED"  # the line is full
    assert code(hurried.take()) == "CAPACITY_REACHED"
    patient.send(type="cancel", id=2, request=1)
    assert {patient.take()["type"], patient.take()["type"]} == {"cancelled", "error"}
    server.wait_for(lambda: not server.manager.queue)


def test_a_client_that_leaves_the_line_frees_its_place(serve: Serve, dial: Dial) -> None:
    server = serve(app(sessions=1))
    holder = dial(server)
    holder.open()
    gone, next_one = dial(server), dial(server)
    gone.open(wait_s=60)
    next_one.open(wait_s=60)
    gone.cut()
    server.wait_for(lambda: len(server.manager.queue) == 1)
    holder.ask(type="close", id=1)
    while (message := next_one.take())["type"] == "event":
        pass
    assert message["type"] == "opened"


def test_messagepack_says_the_same(serve: Serve, dial: Dial) -> None:
    peer = dial(serve(app()), PACKED)

    def ask(**message: Any) -> dict[str, Any]:
        peer.connection.send(MSGPACK.encode(message))
        return MSGPACK.decode(peer.connection.recv(timeout=10), binary=True)  # type: ignore[arg-type]

    opened = ask(type="open", id=1)
    assert opened["type"] == "opened"
    assert total(ask(type="step", id=1, data={"amount": 2})) == 2
    reply = ask(type="batch", id=2, requests=[{"type": "step", "id": 2, "session": opened["session"], "data": {}}])
    assert [total(one) for one in reply["replies"]] == [3]
    assert code(ask(type="step", id=3, data={"amount": "x"})) == "VALIDATION_ERROR"


def test_a_reply_that_was_written_in_one_codec_is_repeated_in_another(serve: Serve, dial: Dial) -> None:
    server = serve(app())
    peer = dial(server)
    token = peer.open()["token"]
    first = peer.ask(type="step", id=1, data={"amount": 2})
    packed = dial(server, PACKED)
    packed.connection.send(MSGPACK.encode({"type": "open", "id": 1, "resume": token}))
    packed.connection.recv(timeout=10)
    packed.connection.send(MSGPACK.encode({"type": "step", "id": 1, "data": {"amount": 2}}))
    assert MSGPACK.decode(packed.connection.recv(timeout=10), binary=True) == first  # type: ignore[arg-type]


def test_large_messages_are_compressed_for_those_who_ask(serve: Serve, dial: Dial) -> None:
    server = serve(app())
    peer = dial(server)
    peer.open(compress=1000)
    peer.send(type="step", id=1, data={}, kwargs={"note": "x" * 5000})
    payload = peer.connection.recv(timeout=10)
    assert isinstance(payload, bytes)
    assert len(payload) < 1000


def test_production_mode_plays_episodes_over_the_socket(serve: Serve, dial: Dial) -> None:
    server = serve(create_fastapi_app(Counter, Add, Sum, mode="production"))
    peer = dial(server)
    assert peer.open()["type"] == "opened"
    asked = [peer.ask(type="reset", id=1), peer.ask(type="step", id=2, data={}), peer.ask(type="state", id=3)]
    assert [answer["type"] for answer in asked] == ["observation", "observation", "state"]


def test_nothing_is_left_of_many_sessions(serve: Serve, dial: Dial) -> None:
    server = serve(app(sessions=64, grace_s=0.1))
    before, closed = set(threading.enumerate()), Counter.closed
    peer = dial(server)
    for number in range(64):
        peer.open(number + 1)
    peer.cut()
    server.wait_for(lambda: not server.manager.sessions())
    assert Counter.closed == closed + 64
    server.wait_for(lambda: len(set(threading.enumerate()) - before) <= 8)
