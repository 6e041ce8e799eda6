"""Processes of plain uvicorn: a request for a session of another one gets an error that says so, and what to do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import http_calls
from counting_app import app
from dict_client import DictHTTPClient
from openenv import GenericEnvClient
from openenv.errors import SessionElsewhere, SessionLost, SessionNotFoundError
from openenv.protocol.client_sessions import error_from_frame
from openenv.server.sessions.peers import Peers, SeparatePeers, peers_of_process
from servers import Serve
from worker_servers import APP, WorkersServer

TRIES = 400
ADVICE = "openenv serve --workers N"


@pytest.fixture(scope="module")
def server() -> Iterator[WorkersServer]:
    """Two processes of uvicorn, which share nothing but their port."""
    served = WorkersServer(
        "--workers",
        "2",
        "--app-dir",
        str(APP.parent),
        target="counting_app:app",
        command=("uvicorn",),
    )
    served.wait_for(lambda: served.output.count("Application startup complete") == 2)
    yield served
    served.end()


@pytest.fixture
def neighbour() -> Iterator[int]:
    """Another process; its id."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        yield other.pid
        other.communicate(b"\n")


def test_every_surface_answers_for_a_session_of_another_process(serve: Serve, neighbour: int) -> None:
    server, family = serve(app), os.urandom(32)
    server.manager.share(SeparatePeers(family, os.getpid()))
    url, name = server.url, SeparatePeers(family, neighbour).new_id()
    headers = {"X-OpenEnv-Session": name}
    answers = [
        http_calls.post(f"{url}/step", json={"action": {}}, headers=headers),
        http_calls.get(f"{url}/state", headers={"cookie": f"openenv_session={name}"}),
        http_calls.get(f"{url}/sessions/{name}"),
    ]
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (421, "SESSION_ELSEWHERE")
        assert ADVICE in answer.json()["detail"]
        assert "set-cookie" not in answer.headers  # the session is there
    params = {"name": "add", "arguments": {"by": 1}, "session_id": name}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    error = http_calls.post(f"{url}/mcp", json=message).json()["error"]
    assert (error["data"], ADVICE in error["message"]) == ({"code": "SESSION_ELSEWHERE"}, True)
    mcp = http_calls.delete(f"{url}/mcp", headers={"mcp-session-id": name})
    assert (mcp.status_code, ADVICE in mcp.text) == (421, True)
    with connect(f"{url.replace('http', 'ws')}/ws?session_id={name}", proxy=None) as peer:
        assert json.loads(peer.recv(timeout=60))["data"]["code"] == "SESSION_ELSEWHERE"
    with connect(f"{url.replace('http', 'ws')}/ws", subprotocols=["openenv.v2.json"], proxy=None) as peer:  # type: ignore[list-item]
        peer.send(json.dumps({"type": "open", "id": 1, "resume": f"boot.{name}.secret"}))
        assert json.loads(peer.recv(timeout=60))["data"]["code"] == "SESSION_ELSEWHERE"
    unknown = http_calls.post(f"{url}/step", json={"action": {}}, headers={"X-OpenEnv-Session": name[:-1] + "z"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "SESSION_NOT_FOUND")


def until(send: Callable[[], httpx2.Response], status: int) -> httpx2.Response:
    """Send a request over new connections until it reaches a process that answers so."""
    for _ in range(TRIES):
        answer = send()
        if answer.status_code == status:
            return answer
        assert answer.status_code in (200, 404, 421), answer.text  # 404: it is no MCP session
    raise AssertionError(f"no answer with status {status}")


@pytest.mark.slow
def test_requests_for_a_session_of_the_other_process_get_a_typed_error(server: WorkersServer) -> None:
    url = server.url
    opened = http_calls.post(f"{url}/reset", json={}, headers={"X-OpenEnv-Session": "new"})
    name = opened.headers["x-openenv-session"]
    headers = {"X-OpenEnv-Session": name}
    lost = until(lambda: http_calls.post(f"{url}/step", json={"action": {}}, headers=headers), 421)
    assert lost.json()["code"] == "SESSION_ELSEWHERE"
    assert ADVICE in lost.json()["detail"]
    assert until(lambda: http_calls.get(f"{url}/sessions/{name}"), 421).json()["code"] == "SESSION_ELSEWHERE"
    kept = until(lambda: http_calls.get(f"{url}/state", headers={"cookie": f"openenv_session={name}"}), 421)
    assert "set-cookie" not in kept.headers  # the session is there

    def call() -> httpx2.Response:
        params = {"name": "add", "arguments": {"by": 1}, "session_id": name}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        answer = http_calls.post(f"{url}/mcp", json=message)
        return httpx2.Response(421 if "error" in answer.json() else 200, content=answer.content)

    error = until(call, 421).json()["error"]
    assert (error["data"], ADVICE in error["message"]) == ({"code": "SESSION_ELSEWHERE"}, True)
    mcp = until(lambda: http_calls.delete(f"{url}/mcp", headers={"mcp-session-id": name}), 421)
    assert ADVICE in mcp.text
    for _ in range(TRIES):
        with connect(f"{url.replace('http', 'ws')}/ws?session_id={name}", proxy=None) as peer:
            with contextlib.suppress(ConnectionClosed):  # a refused one is closed at once
                peer.send('{"type":"state"}')
            reply = json.loads(peer.recv(timeout=60))
        if reply["type"] == "error":
            break
    assert (reply["data"]["code"], ADVICE in reply["data"]["message"]) == ("SESSION_ELSEWHERE", True)
    unknown = http_calls.post(f"{url}/step", json={"action": {}}, headers={"X-OpenEnv-Session": name[:-1] + "z"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "SESSION_NOT_FOUND")


@pytest.mark.slow
def test_clients_raise_it_and_a_websocket_finds_its_session_again(server: WorkersServer) -> None:
    with DictHTTPClient(server.url) as client:
        assert client.reset().observation["total"] == 0
        taken = 0
        with pytest.raises(SessionElsewhere) as elsewhere:
            for _ in range(TRIES):
                client._http.close()
                client._http = client._new_http()
                taken += 1
                assert client.step({"by": 1}).observation["total"] == taken
        assert elsewhere.value.session_id == client.session_id
        assert ADVICE in str(elsewhere.value)
    resumed: Any = GenericEnvClient(server.url, reconnect_timeout_s=60.0).sync()
    with resumed:
        pid = resumed.reset().observation["pid"]
        for turn in range(1, 9):
            resumed._driver._connection._socket.shutdown(2)
            seen = resumed.step({"by": 1}).observation
            assert (seen["total"], seen["pid"]) == (turn, pid)


def test_only_processes_of_one_family_know_each_others_ids() -> None:
    family, pid = os.urandom(32), os.getpid()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        here, beside = SeparatePeers(family, pid), SeparatePeers(family, other.pid)
        name = beside.new_id()
        assert isinstance(here.absence(name), SessionElsewhere)
        assert beside.absence(name) is None  # it has ended there
        assert SeparatePeers(os.urandom(32), pid).absence(name) is None
        for wrong in (name[:-1], name.replace("-p", "-p1"), "x-p0-000000000000", f"x-p{'f' * 7}-{'0' * 12}"):
            assert here.absence(wrong) is None
        other.communicate(b"\n")
    assert here.absence(name) is None  # the process is gone, and the session with it
    assert type(peers_of_process()) is Peers  # a process of its own


def test_the_code_is_an_exception_of_its_own_and_no_loss() -> None:
    error = error_from_frame({"code": "SESSION_ELSEWHERE", "message": "there", "session_id": "s1"})
    assert isinstance(error, SessionElsewhere)
    assert isinstance(error, SessionNotFoundError)
    assert not isinstance(error, SessionLost)
    assert (error.session_id, error.code) == ("s1", "SESSION_ELSEWHERE")
