"""Clients of v2 against servers that follow a script: old ones, rude ones, and ones that change between connections."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from openenv import GenericEnvClient, MCPToolClient
from openenv.errors import ConnectFailed, ProtocolError, RequestCancelled, SessionLost, StaleRequest
from servers import Serve

V2 = "openenv.v2.json"

Script = Callable[["Line"], None]


class Line:
    """One connection, from the server's side."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    def next(self) -> dict[str, Any]:
        """Return the next request."""
        request: dict[str, Any] = json.loads(self._connection.recv(10))
        return request

    def say(self, kind: str, message_id: int | None, **content: Any) -> None:
        """Send a message."""
        self._connection.send(json.dumps({"type": kind, "id": message_id, **content}))

    def open(self, *, token: str = "b1.s.t", resumed: bool = False, last_id: int = 0) -> dict[str, Any]:
        """Answer a request for a session, and return it."""
        request = self.next()
        assert request["type"] == "open"
        self.say("opened", request["id"], session="s", token=token, resumed=resumed, last_id=last_id, grace_s=60)
        return request

    def observe(self, message_id: int | None, number: int = 0) -> None:
        """Answer with an observation."""
        self.say("observation", message_id, data={"observation": {"n": number}, "reward": None, "done": False})

    def fail(self, message_id: int | None, code: str, **details: Any) -> None:
        """Answer with an error."""
        self.say("error", message_id, data={"message": "m", "code": code, **details})

    def wait(self) -> None:
        """Wait until the client hangs up, and return what it says before."""
        for _ in self._connection:
            pass


class Stage:
    """A server whose connections follow a script each, the last one again and again."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.subprotocols: list[Any] = [V2]
        self.failures: list[BaseException] = []
        self._count = 0
        self._server = serve(self._play, "127.0.0.1", 0, select_subprotocol=self._select)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _select(self, connection: ServerConnection, offered: Any) -> Any:
        return V2 if V2 in offered and self._speaks_v2() else None

    def _speaks_v2(self) -> bool:
        return bool(self.subprotocols[min(self._count, len(self.subprotocols) - 1)])

    def _play(self, connection: ServerConnection) -> None:
        script = self.scripts[min(self._count, len(self.scripts) - 1)]
        self._count += 1
        try:
            script(Line(connection))
        except AssertionError as exc:
            self.failures.append(exc)
        except Exception:
            return

    def end(self) -> None:
        self._server.shutdown()
        self._thread.join(5)
        assert not self.failures


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A server without a script yet."""
    server = Stage()
    yield server
    server.end()


Do = Callable[..., Any]


@pytest.fixture(params=["blocking", "awaited"])
def use(request: pytest.FixtureRequest, stage: Stage) -> Iterator[Callable[..., Do]]:
    """Make a client of the server and return what calls its methods, blocking or awaiting."""
    loop = None if request.param == "blocking" else asyncio.new_event_loop()
    clients: list[Any] = []

    def make(cls: Any = GenericEnvClient, **options: Any) -> Do:
        client = cls(stage.url, **options)
        clients.append(client)

        def do(method: str, *args: Any, **kwargs: Any) -> Any:
            if loop is None:
                return getattr(client, method)(*args, **kwargs)

            async def call() -> Any:
                return await getattr(client, method)(*args, **kwargs)

            return loop.run_until_complete(call())

        return do

    yield make
    for client in clients:
        if loop is None:
            client.close()
        else:
            loop.run_until_complete(client.close())
    if loop is not None:
        loop.close()


def _v1(line: Line) -> None:
    while True:
        line.next()
        line._connection.send('{"type":"observation","data":{"observation":{"n":1},"reward":null,"done":false}}')


def _v2(line: Line) -> None:
    line.open()
    while True:
        line.observe(line.next()["id"], 2)


def test_a_server_without_v2_is_spoken_to_in_v1(stage: Stage, use: Callable[..., Do]) -> None:
    stage.subprotocols, stage.scripts = [None], [_v1]
    assert use()("reset").observation == {"n": 1}


def test_a_client_that_insists_on_v2_refuses_another_server(stage: Stage, use: Callable[..., Do]) -> None:
    stage.subprotocols, stage.scripts = [None], [_v1]
    do = use(protocol="v2")
    for _ in range(2):
        with pytest.raises(ProtocolError, match="does not speak protocol v2"):
            do("reset")


def test_a_client_that_wants_v1_offers_nothing(stage: Stage, use: Callable[..., Do]) -> None:
    stage.scripts = [_v1]
    assert use(protocol="v1")("reset").observation == {"n": 1}


def test_a_subprotocol_that_was_not_offered_is_a_failed_connection(serve: Serve) -> None:
    async def odd(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept", "subprotocol": "chat"})
        await receive()

    with pytest.raises(ConnectFailed, match="not offered"):
        GenericEnvClient(serve(odd, lifespan="off").url).sync().connect()


def test_a_token_is_no_good_on_a_server_that_speaks_only_v1(stage: Stage, use: Callable[..., Do]) -> None:
    stage.subprotocols, stage.scripts = [None], [_v1]
    do = use(resume_token="b1.s.t")
    with pytest.raises(SessionLost, match="does not speak protocol v2"):
        do("step", {})
    assert do("reset").observation == {"n": 1}


def test_a_server_that_comes_back_with_v1_only_has_lost_the_session(stage: Stage, use: Callable[..., Do]) -> None:
    def once(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])

    stage.subprotocols, stage.scripts = [V2, None], [once, _v1]
    do = use()
    do("reset")
    for _ in range(2):
        with pytest.raises(SessionLost, match="does not speak protocol v2"):
            do("step", {})
    assert do("reset").observation == {"n": 1}
    assert do("step", {}).observation == {"n": 1}


def test_a_server_that_comes_back_with_v2_is_spoken_to_in_it_after_reset(stage: Stage, use: Callable[..., Do]) -> None:
    def once(line: Line) -> None:
        line.next()
        line._connection.send('{"type":"observation","data":{"observation":{"n":1},"reward":null,"done":false}}')

    stage.subprotocols, stage.scripts = [None, V2], [once, _v2]
    do = use()
    do("reset")
    with pytest.raises(SessionLost):
        do("step", {})
    assert do("reset").observation == {"n": 2}
    assert do("step", {}).observation == {"n": 2}


def test_the_unanswered_request_is_repeated_with_the_same_id(stage: Stage, use: Callable[..., Do]) -> None:
    requests: list[dict[str, Any]] = []

    def lost(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])
        requests.append(line.next())

    def again(line: Line) -> None:
        requests.append(line.open(resumed=True, last_id=2))
        requests.append(line.next())
        line.observe(requests[-1]["id"], 7)
        line.wait()

    stage.scripts = [lost, again]
    do = use()
    do("reset")
    assert do("step", {"x": 1}).observation == {"n": 7}
    first, resume, second = requests
    assert first == second == {"type": "step", "id": 2, "data": {"x": 1}}
    assert resume["resume"] == "b1.s.t"


def test_late_and_foreign_replies_are_dropped(stage: Stage, use: Callable[..., Do]) -> None:
    def rude(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"], 1)
        line.observe(1, 100)
        second = line.next()["id"]
        line.observe(1, 101)
        line.observe(second + 1, 102)
        line.fail(1, "EXECUTION_ERROR")
        line.observe(second, 2)
        line.observe(second, 103)
        line.observe(line.next()["id"], 3)
        line.wait()

    stage.scripts = [rude]
    do = use()
    assert [do("reset").observation["n"], do("step", {}).observation["n"], do("step", {}).observation["n"]] == [1, 2, 3]


def test_a_reply_that_came_by_itself_after_a_resume_will_do(stage: Stage, use: Callable[..., Do]) -> None:
    def lost(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])
        line.next()

    def eager(line: Line) -> None:
        line.open(resumed=True, last_id=2)
        line.observe(2, 5)
        line.observe(2, 6)
        while True:
            request = line.next()
            if request["type"] == "step" and request["id"] == 3:
                line.observe(3, 8)

    stage.scripts = [lost, eager]
    do = use()
    do("reset")
    assert do("step", {}).observation["n"] in (5, 6)
    assert do("step", {}).observation["n"] == 8


def test_a_stale_request_ends_the_episode(stage: Stage, use: Callable[..., Do]) -> None:
    def stale(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])
        line.fail(line.next()["id"], "STALE_REQUEST", last_id=9)
        line.wait()

    stage.scripts = [stale]
    do = use()
    do("reset")
    with pytest.raises(StaleRequest) as caught:
        do("step", {})
    assert caught.value.last_id == 9
    with pytest.raises(SessionLost):
        do("step", {})


def test_a_cancelled_request_does_not_end_the_episode(stage: Stage, use: Callable[..., Do]) -> None:
    def cancels(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])
        line.fail(line.next()["id"], "CANCELLED")
        line.observe(line.next()["id"], 4)
        line.wait()

    stage.scripts = [cancels]
    do = use()
    do("reset")
    with pytest.raises(RequestCancelled):
        do("step", {})
    assert do("step", {}).observation == {"n": 4}


@pytest.mark.parametrize("when", ["between", "during"])
def test_a_session_that_ends_is_lost_with_its_reason(stage: Stage, use: Callable[..., Do], when: str) -> None:
    def ends(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])
        if when == "during":
            line.next()
        line._connection.send('{"type":"event","event":"detached","session":"s","reason":"worker crashed"}')
        if when == "during":
            line.wait()

    stage.scripts = [ends]
    do = use(reconnect_timeout_s=0.3)
    do("reset")
    for _ in range(2):
        with pytest.raises(SessionLost) as caught:
            do("step", {})
        assert caught.value.reason == "worker crashed"


def test_a_session_that_another_client_has_used_meanwhile_is_lost(stage: Stage, use: Callable[..., Do]) -> None:
    def lost(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])
        line.next()

    def moved_on(line: Line) -> None:
        line.open(resumed=True, last_id=5)
        line.wait()

    stage.scripts = [lost, moved_on]
    do = use()
    do("reset")
    with pytest.raises(SessionLost) as caught:
        do("step", {})
    assert caught.value.reason == "continued elsewhere"


def test_a_connection_that_breaks_at_each_attempt_has_an_end(stage: Stage, use: Callable[..., Do]) -> None:
    def begins(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])

    def breaks(line: Line) -> None:
        line.open(resumed=True, last_id=1)
        line.next()

    stage.scripts = [begins, breaks]
    do = use(reconnect_timeout_s=0.5)
    do("reset")
    with pytest.raises(SessionLost, match="not resumed"):
        do("step", {})


def test_what_was_waited_for_in_vain_is_cancelled_and_the_session_closed(stage: Stage, use: Callable[..., Do]) -> None:
    messages: list[dict[str, Any]] = []
    done = threading.Event()

    def silent(line: Line) -> None:
        line.open()
        line.observe(line.next()["id"])
        line.next()
        messages.extend([line.next(), line.next()])
        done.set()

    stage.scripts = [silent]
    do = use(message_timeout_s=1.5)
    do("reset")
    with pytest.raises(TimeoutError):
        do("step", {})
    assert done.wait(30)
    cancel, close = messages
    assert (cancel["type"], cancel["request"]) == ("cancel", 2)
    assert close["type"] == "close"
    assert close["id"] > 2


def test_progress_comes_as_events_and_keeps_a_call_going(stage: Stage, use: Callable[..., Do]) -> None:
    def slow(line: Line) -> None:
        line.open()
        request = line.next()
        for done in range(1, 5):
            line.say("event", request["id"], event="progress", progress=done, total=4, message=f"part {done}")
            threading.Event().wait(0.5)
        reply = {"jsonrpc": "2.0", "id": request["data"]["id"], "result": {"content": [], "data": 5, "is_error": False}}
        line.say("mcp", request["id"], data=reply)
        line.wait()

    stage.scripts = [slow]
    do = use(MCPToolClient, message_timeout_s=1.7)
    reports: list[Any] = []
    assert do("call_tool_with", "add", {}, on_progress=lambda *report: reports.append(report)) == 5
    assert reports == [(done, 4, f"part {done}") for done in range(1, 5)]
