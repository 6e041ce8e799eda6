"""`HTTPEnvClient`: a stateful episode over HTTP, and what happens to it when things go wrong."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

import dict_client
from dict_client import DictHTTPClient
from openenv.errors import (
    ConnectFailed,
    ExecutionError,
    ProtocolError,
    RequestTimeout,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
)
from servers import Serve


def test_an_episode_keeps_its_state_between_requests(parrot: Any) -> None:
    with DictHTTPClient(parrot.url) as client:
        assert client.session_id is None
        assert client.reset(seed=2).observation["text"] == "seed 2"
        for _ in range(3):
            client.step({"message": "a"})
        assert client.state()["step_count"] == 3
        client.reset()
        assert client.state()["step_count"] == 0
        assert parrot.manager.active == 1
    parrot.wait_for(lambda: parrot.manager.active == 0)


def test_a_bare_host_is_an_address(parrot: Any) -> None:
    with DictHTTPClient(f"127.0.0.1:{parrot.port}/") as client:
        assert client.base_url == parrot.url
        client.reset()


def test_the_names_that_subclasses_of_the_oldest_client_use_are_there() -> None:
    client = DictHTTPClient("http://localhost:1/", 3)
    assert (client._base, client._timeout) == ("http://localhost:1", 3.0)


def test_errors_are_typed(serve: Serve, parrot_app: Callable[..., Any]) -> None:
    server = serve(parrot_app(sessions=1))
    with DictHTTPClient(server.url) as client:
        client.reset()
        with pytest.raises(RequestValidationError) as caught:
            client.step({"message": 7})
        assert caught.value.details["errors"][0]["loc"] == ["message"]
        with DictHTTPClient(server.url) as other, pytest.raises(SessionCapacityError) as full:
            other.reset()
        assert (full.value.active_sessions, full.value.max_sessions) == (1, 1)
        assert client.step({"message": "still"}).observation["text"] == "still"


def test_errors_are_errors_of_requests_too_if_the_program_has_imported_it(parrot: Any, gate: threading.Event) -> None:
    with DictHTTPClient(parrot.url, 0.5) as client:
        client.reset()
        with pytest.raises(requests.exceptions.HTTPError) as refused:
            client.step({"message": 7})
        assert isinstance(refused.value, RequestValidationError)
        assert (refused.value.response, refused.value.code) == (None, "VALIDATION_ERROR")
        assert type(refused.value).__name__ == "RequestValidationError"
        sent = pickle.loads(pickle.dumps(refused.value))
        assert (type(sent), str(sent), sent.details) == (
            RequestValidationError, str(refused.value), refused.value.details
        )  # fmt: skip
        with pytest.raises(requests.Timeout) as late:
            client.step({"message": "wait"})
        assert isinstance(late.value, RequestTimeout)
        with pytest.raises(requests.ConnectionError) as lost:
            client.step({"message": "go on"})
        assert isinstance(lost.value, SessionLost)
        gate.set()


def test_a_program_without_requests_gets_plain_errors() -> None:
    program = (
        f"import sys\nsys.path.append({str(Path(dict_client.__file__).parent)!r})\n"
        "from dict_client import DictHTTPClient\nfrom openenv.errors import ConnectFailed\n"
        "try:\n    DictHTTPClient('http://127.0.0.1:9').reset()\n"
        "except ConnectFailed as error:\n    print(type(error) is ConnectFailed, 'requests' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_a_first_reset_that_fails_does_not_lose_its_slot(serve: Serve, parrot_app: Callable[..., Any]) -> None:
    server = serve(parrot_app(sessions=1))
    with DictHTTPClient(server.url) as client:
        for _ in range(3):
            with pytest.raises(ExecutionError, match="reset failed"):
                client.reset(fail=True)
        assert client.reset().observation["text"] == "seed None"
    server.wait_for(lambda: server.manager.active == 0)


def test_a_session_that_has_ended_is_lost_until_reset(parrot: Any) -> None:
    with DictHTTPClient(parrot.url) as client:
        client.reset()
        parrot.manager.find(client.session_id).close("expired")
        parrot.wait_for(lambda: parrot.manager.active == 0)
        for _ in range(2):
            with pytest.raises(SessionLost, match="expired"):
                client.step({"message": "a"})
        with pytest.raises(SessionLost):
            client.state()
        assert client.reset().observation["text"] == "seed None"
        assert client.step({"message": "a"}).observation["text"] == "a"


def test_a_server_that_was_restarted_has_lost_the_episode_and_reset_begins_another(parrot: Any) -> None:
    with DictHTTPClient(parrot.url) as client:
        client.reset()
        client._session_id = "of-an-earlier-server"
        with pytest.raises(SessionLost):
            client.step({"message": "a"})
        assert client.reset().observation["text"] == "seed None"
        assert client.step({"message": "a"}).observation["text"] == "a"


def test_a_request_that_times_out_loses_the_episode(parrot: Any, gate: threading.Event) -> None:
    client = DictHTTPClient(parrot.url, request_timeout_s=1.5)
    client.reset()
    with pytest.raises(RequestTimeout):
        client.step({"message": "wait"})
    with pytest.raises(SessionLost, match="timed out"):
        client.step({"message": "a"})
    gate.set()
    assert client.reset().observation["text"] == "seed None"
    client.close()


def test_a_server_that_is_not_there_is_a_failed_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed), DictHTTPClient(f"http://127.0.0.1:{unused.getsockname()[1]}") as client:
            client.reset()


def test_a_server_without_sessions_is_warned_about(serve: Serve) -> None:
    server = serve(_answering(b'{"observation":{},"reward":null,"done":false}'), lifespan="off")
    with DictHTTPClient(server.url) as client, pytest.warns(RuntimeWarning, match="keeps no sessions"):
        client.reset()


@pytest.mark.parametrize("body", [b"hello", b"[]"])
def test_an_answer_that_is_no_object_is_a_protocol_error(serve: Serve, body: bytes) -> None:
    server = serve(_answering(body), lifespan="off")
    with DictHTTPClient(server.url) as client, pytest.raises(ProtocolError):
        client.reset()


def _answering(body: bytes) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


def test_default_headers_and_keywords_of_a_step_are_sent(parrot: Any) -> None:
    with DictHTTPClient(parrot.url, default_headers={"X-Key": "k"}) as client:
        client.reset()
        assert client.step({"message": "a"}, timeout_s=1.5, request_id="r").observation["text"] == "a"
        with pytest.raises(RequestValidationError):
            client.step({"message": "a"}, timeout_s=-1)
