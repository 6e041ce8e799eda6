"""The one wait of all providers, against real servers: what it requests, and its error when no server answers."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openenv.errors import OpenEnvError, ServerDied, ServerNotReady
from openenv.providers import wait_for_ready
from openenv.providers.health import ask_health
from openenv.providers.server_process import PortReservation, local_url


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers what its server's `statuses` say, one after the other; the last for ever."""

    server: Any

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        statuses = self.server.statuses
        self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[Callable[..., Any]]:
    servers: list[Any] = []

    def start(*statuses: int) -> Any:
        server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.statuses, server.paths = list(statuses), []
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Running:
    """A watch on something that ends after so many looks."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks

    def ended(self, within_s: float) -> str | None:
        assert within_s >= 0
        if self.looks is None:
            threading.Event().wait(within_s)
            return None
        self.looks -= 1
        return "it fell over" if self.looks <= 0 else None

    def log(self) -> str:
        return "the end of the log"


def test_it_returns_when_the_server_is_well(answering: Callable[..., Any]) -> None:
    server = answering(503, 500, 404, 200)
    wait_for_ready(f"{server.url}/", 60)
    assert server.paths == ["/health"] * 4


def test_a_path_before_the_routes_is_kept(answering: Callable[..., Any]) -> None:
    server = answering(200)
    wait_for_ready(f"{server.url}/env/one/", 60)
    assert server.paths == ["/env/one/health"]


def test_no_proxy_is_asked(answering: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    wait_for_ready(answering(200).url, 60)


def test_the_last_answer_is_in_the_error(answering: Callable[..., Any]) -> None:
    with pytest.raises(ServerNotReady, match=r"Container at http.* did not become ready within 2 s .*answered 503"):
        wait_for_ready(answering(503).url, 2, what="Container")


def test_a_server_that_hangs_up_or_talks_nonsense_is_not_ready() -> None:
    for response in (b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=_send, args=(listener, response), daemon=True)
            thread.start()
            problem = ask_health(f"http://127.0.0.1:{listener.getsockname()[1]}", 30)
            thread.join(30)
        if response == b"HTTP/1.1 200":  # that is an answer, if a short one
            continue
        assert problem is not None


def _send(listener: socket.socket, response: bytes) -> None:
    end, _ = listener.accept()
    with end:
        end.recv(1000)
        end.sendall(response)


def test_a_server_that_accepts_and_says_nothing_is_not_waited_for_beyond_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(ServerNotReady, match=r"within 0\.1 s"):
            wait_for_ready(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.1)


def test_the_end_of_the_server_process_is_reported_with_its_log() -> None:
    with pytest.raises(ServerDied, match=r"Thing ended before it was ready: it fell over\.\nThe end.*\nthe end"):
        wait_for_ready("http://127.0.0.1:9", 280, what="Thing", watch=Running(3))


def test_a_timeout_has_the_log_and_the_advice() -> None:
    with pytest.raises(ServerNotReady, match=r"Look there\.\nThe end of its log:\nthe end of the log") as caught:
        wait_for_ready("http://127.0.0.1:9", 0.1, watch=Running(None), advice=lambda: "Look there.")
    assert caught.value.log == "the end of the log"
    assert isinstance(caught.value, OpenEnvError)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, TimeoutError)


def test_no_time_at_all_is_one_try(answering: Callable[..., Any]) -> None:
    url = answering(200).url
    for _ in range(20):  # one try is short, and a busy machine may take longer
        with contextlib.suppress(ServerNotReady):
            wait_for_ready(url, 0)
            break
    else:
        pytest.fail("a server that answers was never found ready")
    with pytest.raises(ServerNotReady):
        wait_for_ready("http://127.0.0.1:9", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_reserved_port_is_not_given_out_again_but_a_server_can_listen_there(host: str) -> None:
    reservation = PortReservation(host)
    try:
        others = [PortReservation(host) for _ in range(50)]
        assert reservation.port not in {other.port for other in others}
        for other in others:
            other.release()
        with socket.create_server((host, reservation.port)) as server:
            socket.create_connection(("127.0.0.1", reservation.port), 30).close()
            server.accept()[0].close()
    finally:
        reservation.release()
        reservation.release()


def test_an_address_is_one_that_can_be_reached_from_here() -> None:
    assert local_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert local_url("::", 1) == "http://[::1]:1"
    assert local_url("::1", 1) == "http://[::1]:1"
    assert local_url("localhost", 1) == "http://localhost:1"
