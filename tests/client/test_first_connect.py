"""The first connect of a client is tried again where that may help, and leaves one session behind, not two."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.sync.server import serve as serve_sockets

from openenv import GenericEnvClient, VectorEnv
from openenv.client.flows import Attempts
from openenv.client.network import ConnectionOptions, connect_failure, parse_ws_url
from openenv.env.binding import infer_models
from openenv.errors import AccessDenied, ConnectFailed, ProtocolError, SessionCapacityError
from openenv.protocol.backoff import Backoff
from openenv.protocol.client_sessions import ResumableSession
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.sessions.events import SessionEvent
from servers import Serve
from slow_steps import take

both = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])

Connecting = Callable[..., Any]


@pytest.fixture(params=["blocking", "awaited", "vector"])
def connecting(request: pytest.FixtureRequest, player: Any) -> Iterator[Connecting]:
    """Connect a client of any kind and reset it."""
    envs: list[VectorEnv[Any, Any]] = []

    def begin(url: str, **options: Any) -> Any:
        if request.param != "vector":
            return player(url, blocking=request.param == "blocking", **options)("reset")
        envs.append(VectorEnv(url, 2, connections=1, **options))
        return envs[-1].reset()

    yield begin
    for env in envs:
        env.close()


class FaultyListener:
    """Listens, and gives each connection the next treatment; the last one repeats."""

    def __init__(self, *treatments: Callable[[socket.socket], None], port: int = 0) -> None:
        self.treatments = treatments
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.count = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            treat = self.treatments[min(self.count, len(self.treatments) - 1)]
            self.count += 1
            with contextlib.suppress(OSError):
                treat(client)

    def __enter__(self) -> FaultyListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


def resets(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def cuts_handshake(client: socket.socket) -> None:
    client.recv(65536)
    client.sendall(b"HTTP/1.1 101 Switching Pro")
    client.close()


def answers(status: str) -> Callable[[socket.socket], None]:
    def answer(client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        client.close()

    return answer


def joins(port: int) -> Callable[[socket.socket], None]:
    """Pass a connection on to a server."""

    def join(client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", port))
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()

    return join


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


# -- trying again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [resets, cuts_handshake, answers("503 Service Unavailable")])
def test_a_connection_that_breaks_before_it_stands_is_tried_again(
    start: Any, connecting: Connecting, trouble: Callable[[socket.socket], None]
) -> None:
    server = start()
    with FaultyListener(trouble, trouble, trouble, joins(server.port)) as listener:
        connecting(listener.url)
        assert listener.count == 4


def test_a_server_that_is_just_starting_is_waited_for(
    start: Any, connecting: Connecting, free_port: Callable[[], int]
) -> None:
    server, port = start(), free_port()
    with contextlib.ExitStack() as stack:
        later = threading.Timer(0.4, lambda: stack.enter_context(FaultyListener(joins(server.port), port=port)))
        later.start()
        stack.callback(later.join, 30)
        connecting(f"http://127.0.0.1:{port}", connect_timeout_s=30, retry_refused_s=30)


def test_a_server_that_is_not_there_is_a_quick_error_that_counts_its_tries(
    connecting: Connecting, free_port: Callable[[], int]
) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectFailed, match=r"Failed to connect .* tries in ") as caught:
        connecting(f"http://127.0.0.1:{free_port()}", connect_timeout_s=60)
    assert time.monotonic() - began < 30  # and not the 60 s that connecting may take
    assert caught.value.attempts > 2
    assert isinstance(caught.value.__cause__, OSError)


def test_a_client_that_does_not_wait_gets_the_error_after_one_try(
    connecting: Connecting, free_port: Callable[[], int]
) -> None:
    with pytest.raises(ConnectFailed) as caught:
        connecting(f"http://127.0.0.1:{free_port()}", retry_refused_s=0)
    assert caught.value.attempts == 1
    assert "tries" not in str(caught.value)


def test_when_the_time_is_over_the_error_has_the_tries_and_the_last_cause(connecting: Connecting) -> None:
    with (
        FaultyListener(cuts_handshake) as listener,
        pytest.raises(ConnectFailed, match="closed the connection during") as caught,
    ):
        connecting(listener.url, connect_timeout_s=1.5)
    assert caught.value.attempts > 2
    assert listener.count == caught.value.attempts


@pytest.mark.parametrize("status", ["404 Not Found", "403 Forbidden", "500 Internal Server Error", "200 OK"])
def test_a_server_that_says_no_is_not_asked_again(connecting: Connecting, status: str) -> None:
    with FaultyListener(answers(status)) as listener, pytest.raises(ConnectFailed, match=status):
        connecting(listener.url)
    assert listener.count == 1


def test_a_refused_token_is_not_tried_again(serve: Serve, parrot_app: Any, connecting: Connecting) -> None:
    server = serve(parrot_app(access=AccessPolicy(orchestrator="right-token")))
    with FaultyListener(joins(server.port)) as listener, pytest.raises(AccessDenied):
        connecting(listener.url, token="wrong-token")
    assert listener.count == 1


@both
def test_a_server_without_v2_is_not_asked_again_where_v2_is_required(
    published_server: FaultyListener, player: Any, blocking: bool
) -> None:
    with pytest.raises(ProtocolError, match="protocol v2"):
        player(published_server.url, blocking=blocking, protocol="v2")("reset")
    assert published_server.count == 1


@pytest.fixture
def published_server() -> Iterator[FaultyListener]:
    """A server that knows no subprotocols."""

    def play(connection: Any) -> None:
        for _ in connection:
            connection.send('{"type":"observation","data":{"observation":{"n":1},"reward":null,"done":false}}')

    server = serve_sockets(play, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with FaultyListener(joins(server.socket.getsockname()[1])) as listener:
        yield listener
    server.shutdown()
    thread.join(5)


@both
def test_an_older_server_is_tried_again_as_well(published_server: FaultyListener, player: Any, blocking: bool) -> None:
    published_server.treatments = (cuts_handshake, *published_server.treatments)
    assert player(published_server.url, blocking=blocking)("reset").observation == {"n": 1}
    assert published_server.count == 2


# -- one session ----------------------------------------------------------------------------------------------------


def _count_openings(server: Any) -> list[str]:
    """List the sessions that a server opens from now on."""
    opened: list[str] = []
    server.manager.listeners.append(lambda event: opened.append(event.session_id) if event.name == "opened" else None)
    return opened


def _opened_size(server: Any) -> int:
    """How many bytes a server sends until a client has a session, the handshake included."""
    with connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=["openenv.v2.json"], proxy=None) as one:  # type: ignore[list-item]
        one.send('{"type":"open","id":1}')
        size = len(one.recv())
        one.send('{"type":"close","id":2}')
        one.recv()
    return size


@both
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_lost_answer_to_open_does_not_leave_a_second_session(
    start: Any, proxy_to: Any, player: Any, blocking: bool, part: float
) -> None:
    server = start(sessions=1)
    size = _opened_size(server)
    server.wait_for(lambda: server.manager.active == 0)
    proxy = proxy_to(server)
    opened = _count_openings(server)
    one = player(proxy.url, blocking=blocking, reconnect_timeout_s=0)
    one("connect")
    proxy.count()
    proxy.cut_after = ("down", int(part * size))
    assert one("reset", seed=3).observation["seed"] == 3
    assert proxy.connections == 2
    assert len(opened) == 1
    assert server.manager.active == 1


def test_lost_answers_to_many_opens_leave_no_second_sessions(start: Any, proxy_to: Any) -> None:
    server = start(sessions=8)
    proxy = proxy_to(server)
    opened = _count_openings(server)
    proxy.cut_after = ("down", 600)  # some have got their answer, some have not
    with VectorEnv(proxy.url, 8, connections=1) as env:
        result = env.reset(seed=0)
        assert [seen["seed"] for seen in result.observations] == list(range(8))
        assert proxy.connections == 2
        assert len(opened) == 8
    server.wait_for(lambda: server.manager.active == 0)


@both
def test_a_constructor_under_way_is_waited_for_and_not_begun_again(
    serve: Serve, env_cls: Any, proxy_to: Any, player: Any, blocking: bool
) -> None:
    built, is_building = itertools.count(), threading.Event()

    def factory() -> Any:
        next(built)
        is_building.set()
        take(0.5)
        return env_cls()

    models = infer_models(env_cls)
    server = serve(create_app(factory, models.action, models.observation, max_concurrent_envs=1))
    proxy = proxy_to(server)
    one = player(proxy.url, blocking=blocking)
    threading.Thread(target=lambda: (is_building.wait(30), proxy.cut()), daemon=True).start()
    one("reset")
    assert proxy.connections == 2
    assert next(built) == 1


def test_a_client_that_finds_its_session_ended_gets_another(start: Any, proxy_to: Any) -> None:
    server = start(sessions=1, grace_s=0.1)
    proxy = proxy_to(server)
    opened = _count_openings(server)
    client = GenericEnvClient(proxy.url).sync()
    client.connect()
    proxy.count()
    proxy.cut_after = ("down", 10)

    def refuse_until_it_ends(event: SessionEvent) -> None:
        if event.session_id == opened[0]:
            proxy.refuses = event.name != "closed"

    server.manager.listeners.append(refuse_until_it_ends)
    assert client.reset(seed=4).observation["seed"] == 4
    assert len(opened) == 2
    client.close()


def test_a_full_server_is_reported_after_one_try(start: Any, connecting: Connecting) -> None:
    server = start(sessions=1)
    holder = GenericEnvClient(server.url).sync()
    holder.reset()
    with pytest.raises(SessionCapacityError):
        connecting(server.url)
    holder.close()


# -- the plan -------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def _refused() -> ConnectFailed:
    try:
        raise connect_failure(
            parse_ws_url("ws://h/ws"), ConnectionRefusedError("refused"), 1
        ) from ConnectionRefusedError()
    except ConnectFailed as exc:
        return exc


def test_pauses_grow_and_end_with_the_time_for_it() -> None:
    clock = Clock()
    plan = Backoff(clock=clock, jitter=lambda: 1.0)
    attempts = Attempts(plan, ConnectionOptions(connect_timeout_s=10, retry_refused_s=2))
    pauses = []
    with pytest.raises(ConnectFailed) as caught:
        while True:
            pauses.append(attempts.pause_after(_refused()))
            clock.now += pauses[-1]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert caught.value.attempts == 6


def test_a_server_that_was_there_is_tried_for_the_whole_time() -> None:
    clock = Clock()
    attempts = Attempts(Backoff(clock=clock), ConnectionOptions(connect_timeout_s=10, retry_refused_s=0))
    clock.now = 5.0
    assert attempts.pause_after(ConnectFailed("cut", is_transient=True)) > 0
    clock.now = 10.0
    with pytest.raises(ConnectFailed, match=r"2 tries in 10\.0 s"):
        attempts.pause_after(ConnectFailed("cut", is_transient=True))


@pytest.mark.parametrize(
    ("cause", "is_transient"),
    [
        (ConnectionRefusedError(), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), False),
        (socket.gaierror(socket.EAI_AGAIN, "later"), True),
        (UnicodeError(), False),
    ],
)
def test_only_what_may_pass_by_itself_is_tried_again(cause: Exception, is_transient: bool) -> None:
    assert connect_failure(parse_ws_url("ws://h/ws"), cause, 1).is_transient is is_transient


def test_each_session_has_a_nonce_of_its_own_until_it_is_open() -> None:
    session = ResumableSession()
    first, again = (json.loads(session.open_request()) for _ in range(2))
    assert first["nonce"] == again["nonce"]
    assert first["id"] != again["id"]
    session.opened(json.dumps({"type": "opened", "id": again["id"], "token": "t", "last_id": 0}).encode())
    assert "nonce" not in json.loads(session.open_request())
    session.forget()
    assert json.loads(session.open_request())["nonce"] != first["nonce"]
