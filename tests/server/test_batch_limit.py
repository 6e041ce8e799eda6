"""How many requests one batch may hold, and how large the answer to it may be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from environments import Add, Counter, Idle, Sum
from openenv import VectorEnv
from openenv.protocol.codec import JSON, MSGPACK, Codec
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.types import Action, Observation
from servers import Serve

LIMIT = 50
POLICY = AccessPolicy(orchestrator="trainer-token", agent="agent-token")
ANSWER_LIMIT = 100_000


class Peer:
    """A client that sends exactly what a test writes, in either encoding."""

    def __init__(self, connection: ClientConnection, codec: Codec) -> None:
        self.connection = connection
        self._codec = codec

    def ask(self, **message: Any) -> dict[str, Any]:
        payload = self._codec.encode(message)
        self.connection.send(payload if self._codec.is_binary else payload.decode())
        return self.take()

    def take(self) -> dict[str, Any]:
        reply = self.connection.recv(timeout=30)
        raw = reply if isinstance(reply, bytes) else reply.encode()
        return self._codec.decode(raw, binary=self._codec.is_binary)


Dial = Callable[..., Peer]


@pytest.fixture
def dial() -> Iterator[Dial]:
    with ExitStack() as stack:

        def dial(server: Any, codec: Codec = JSON, token: str | None = None) -> Peer:
            headers = None if token is None else {"Authorization": f"Bearer {token}"}
            name: Any = codec.name
            address = f"ws://127.0.0.1:{server.port}/ws"
            connection = connect(address, subprotocols=[name], additional_headers=headers, proxy=None, max_size=None)
            return Peer(stack.enter_context(connection), codec)

        yield dial


def steps(session: str, count: int, first: int = 1) -> list[dict[str, Any]]:
    return [{"type": "step", "id": first + n, "session": session, "data": {}} for n in range(count)]


def served(serve: Any, **arguments: Any) -> Any:
    return serve(create_app(Counter, Add, Sum, max_concurrent_envs=32, **arguments))


@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_a_batch_over_the_limit_is_refused_as_a_whole_and_the_session_lives_on(
    serve: Serve, dial: Dial, codec: Codec
) -> None:
    peer = dial(served(serve, max_batch=LIMIT), codec)
    opened = peer.ask(type="open", id=1)
    assert opened["max_batch"] == LIMIT
    session = opened["session"]
    for requests in (steps(session, LIMIT + 1), [{}] * (LIMIT + 1), [1] * (LIMIT + 1)):
        refused = peer.ask(type="batch", id=2, requests=requests)
        assert (refused["type"], refused["id"]) == ("error", 2)
        assert (refused["data"]["code"], refused["data"]["max_batch"]) == ("VALIDATION_ERROR", LIMIT)
    answer = peer.ask(type="batch", id=3, requests=steps(session, LIMIT))
    assert [reply["data"]["observation"]["total"] for reply in answer["replies"]] == list(range(1, LIMIT + 1))


def test_a_batch_of_batches_counts_as_one_request_each_and_none_of_them_is_read(serve: Serve, dial: Dial) -> None:
    peer = dial(served(serve, max_batch=LIMIT))
    inner = {"type": "batch", "id": 9, "requests": [{}] * LIMIT}
    answer = peer.ask(type="batch", id=2, requests=[inner] * LIMIT)
    assert len(answer["replies"]) == LIMIT
    assert {reply["data"]["code"] for reply in answer["replies"]} == {"VALIDATION_ERROR"}


def test_the_limit_holds_for_every_role_and_by_default(serve: Serve, dial: Dial) -> None:
    peer = dial(served(serve, access=POLICY), token="agent-token")
    peer.connection.send('{"requests":[' + "{}," * 10_000 + '{}],"id":7,"type":"batch"}')
    assert peer.take()["data"]["max_batch"] == 10_000
    assert peer.ask(type="ping", id=8) == {"type": "pong", "id": 8}


def test_a_setting_sets_the_limit_where_the_application_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MAX_BATCH", "7")
    monkeypatch.setenv("OPENENV_MAX_UNREAD_MB", "0.5")
    options = create_app(Counter, Add, Sum).state.openenv_server.service.options
    assert (options.max_batch, options.max_unread_bytes) == (7, 524_288)
    own = create_app(Counter, Add, Sum, max_batch=3, max_unread_bytes=4).state.openenv_server.service.options
    assert (own.max_batch, own.max_unread_bytes) == (3, 4)
    with pytest.raises(ValueError, match="max_batch must be positive"):
        create_app(Counter, Add, Sum, max_batch=0)


def test_options_of_the_command_line_replace_those_of_the_application(serve: Serve, dial: Dial) -> None:
    app = create_app(Counter, Add, Sum, max_batch=3)
    app.state.openenv_server.reconfigure(max_batch=5)
    peer = dial(serve(app))
    session = peer.ask(type="open", id=1)["session"]
    assert len(peer.ask(type="batch", id=2, requests=steps(session, 5))["replies"]) == 5
    assert peer.ask(type="batch", id=3, requests=steps(session, 6, first=6))["data"]["max_batch"] == 5


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_a_vector_splits_its_batches(serve: Serve, codec: Any) -> None:
    server = served(serve, max_batch=3)
    with VectorEnv(server.url, 10, connections=1, codec=codec) as env:
        env.reset()
        for total in (2, 4):
            result = env.step([{"amount": 2}] * 10)
            assert list(result.rewards) == [2.0] * 10
            assert [observation["total"] for observation in result.observations] == [total] * 10
    server.wait_for(lambda: server.manager.active == 0)


# -- the size of the answer -----------------------------------------------------------------------------------------


class Size(Action):
    size: int = 0


class Text(Observation):
    text: str = ""
    count: int = 0


class Wordy(Idle):
    """Answers with as much text as it is asked for, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Text:
        self._count += 1
        return Text(text="x" * action.size, count=self._count, reward=1.0)


@pytest.mark.parametrize("runner", ["thread", "inline"])
@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_replies_that_do_not_fit_into_the_answer_are_kept_and_come_when_they_are_asked_for_again(
    serve: Serve, dial: Dial, runner: str, codec: Codec
) -> None:
    app = create_app(Wordy, Size, Text, max_concurrent_envs=4, max_message_bytes=ANSWER_LIMIT, runner=runner)
    peer = dial(serve(app), codec)
    names = [peer.ask(type="open", id=number)["session"] for number in range(1, 5)]
    data = {"size": ANSWER_LIMIT // 2}
    requests = [{"type": "step", "id": 1, "session": name, "data": data} for name in names]
    first, *others = peer.ask(type="batch", id=5, requests=requests)["replies"]
    assert first["data"]["observation"]["count"] == 1
    assert {reply["data"]["code"] for reply in others} == {"REPLY_TOO_LARGE"}
    assert [reply["session"] for reply in others] == names[1:]
    for request in requests[1:]:
        assert peer.ask(**request)["data"]["observation"]["count"] == 1  # it was not run again


@pytest.mark.parametrize("each", [False, True])
def test_a_reply_that_is_asked_for_a_thousand_times_is_not_kept_a_thousand_times(
    serve: Serve, dial: Dial, each: bool
) -> None:
    app = create_app(Wordy, Size, Text, max_message_bytes=ANSWER_LIMIT)
    peer = dial(serve(app))
    session = peer.ask(type="open", id=1)["session"]
    request = {"type": "step", "id": 1, "session": session, "data": {"size": ANSWER_LIMIT // 4}}
    peer.ask(**request)
    peer.connection.send(json.dumps({"type": "batch", "id": 2, "requests": [request] * 600, "each": each}))
    replies: list[dict[str, Any]] = []
    while len(replies) < 600:
        replies += peer.take()["replies"]
    kinds = [reply["type"] for reply in replies]
    assert kinds.count("observation") >= 3
    if not each:  # with `each`, a client that reads gets them all
        assert kinds.count("observation") == 3
        assert replies[-1]["data"]["code"] == "REPLY_TOO_LARGE"


def test_a_vector_gets_replies_that_do_not_fit_into_one_answer(serve: Serve) -> None:
    app = create_app(Wordy, Size, Text, max_concurrent_envs=8, max_message_bytes=ANSWER_LIMIT)
    with VectorEnv(serve(app).url, 8, connections=1) as env:
        env.reset()
        for count in (1, 2):
            result = env.step([{"size": ANSWER_LIMIT // 3}] * 8)
            assert list(result.rewards) == [1.0] * 8
            assert [observation["count"] for observation in result.observations] == [count] * 8
        alone = env.step([{"size": 2 * ANSWER_LIMIT}] * 8)  # larger than the limit even by itself
        assert [len(observation["text"]) for observation in alone.observations] == [2 * ANSWER_LIMIT] * 8
