"""Two workers behave as one server. What a gateway does as well is in `tests/interaction/test_several_processes.py`.

All tests share one server; the last two kill a worker, and end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

import http_calls
from dict_client import DictHTTPClient
from http_calls import close_sessions, open_session
from openenv import GenericEnvClient
from openenv.client.vector.results import VectorResult
from openenv.errors import SessionCapacityError, SessionLost
from openenv.server.workers.board import place_of
from waiting import holds_for
from worker_servers import WorkersServer


def worker_of(name: str) -> int:
    place = place_of(name)
    assert place is not None
    return place.index


def one_of_each(http: httpx2.Client) -> list[str]:
    """Open a session in each worker."""
    sessions: dict[int, str] = {}
    for _ in range(4):
        name = open_session(http)
        if sessions.setdefault(worker_of(name), name) != name:
            http.delete(f"/sessions/{name}")
    assert len(sessions) == 2
    return [sessions[index] for index in sorted(sessions)]


def test_new_sessions_go_to_the_least_loaded_worker(server: WorkersServer) -> None:
    with http_calls.Client(base_url=server.url) as http:
        names = [open_session(http) for _ in range(4)]
        spread = Counter(map(worker_of, names))
        assert spread == {0: 2, 1: 2}
        close_sessions(http, *(name for name in names if worker_of(name) == 0))
        server.wait_for(lambda: server.ready["active_sessions"] == 2)
        again = [open_session(http) for _ in range(2)]
        assert [worker_of(name) for name in again] == [0, 0]
        close_sessions(http, *again, *(name for name in names if worker_of(name) == 1))


def test_a_socket_attaches_to_a_session_of_either_worker(server: WorkersServer) -> None:
    with http_calls.Client(base_url=server.url) as http:
        for name in one_of_each(http):
            http.post("/step", json={"action": {"by": 3}}, headers={"X-OpenEnv-Session": name})
            with connect(f"{server.url.replace('http', 'ws')}/ws?session_id={name}", proxy=None) as peer:
                peer.send('{"type":"step","data":{"by":4}}')
                assert json.loads(peer.recv(timeout=60))["data"]["observation"]["total"] == 7
            close_sessions(http, name)


def test_limits_and_the_queue_are_those_of_the_whole_server(server: WorkersServer) -> None:
    with http_calls.Client(base_url=server.url) as http:
        names = [open_session(http) for _ in range(8)]
        ready = server.ready
        assert ready.pop("server")
        assert ready == {"status": "ready", "active_sessions": 8, "max_sessions": 8, "workers": 2, "hung_workers": 0}
        for _ in range(4):  # in any worker
            refused = http_calls.post(f"{server.url}/sessions", json={})
            assert (refused.status_code, refused.json()["active_sessions"]) == (503, 8)
        with pytest.raises(SessionCapacityError):
            server.client().reset()
        order: list[int] = []
        with ThreadPoolExecutor(6) as pool:

            def wait(place: int) -> str:
                answer = http_calls.post(f"{server.url}/sessions", json={"wait_s": 60})
                order.append(place)
                return str(answer.json()["session_id"])

            waiting = []
            for place in range(4):
                waiting.append(pool.submit(wait, place))
                server.wait_for(lambda: (server.metric("openenv_queue_length") or 0) >= len(waiting))
            for name in names[:4]:
                so_far = len(order)
                close_sessions(http, name)
                server.wait_for(lambda so_far=so_far: len(order) > so_far)
            assert order == [0, 1, 2, 3]
            close_sessions(http, *names[4:], *(one.result() for one in waiting))


def seen_by(result: VectorResult[Any]) -> list[Any]:
    """Return the observations of all slots, which there have to be."""
    assert all(seen is not None for seen in result.observations)
    return list(result.observations)


def test_copies_stay_with_the_worker_of_their_original(server: WorkersServer) -> None:
    with http_calls.Client(base_url=server.url) as http:
        sessions, copies, tokens = one_of_each(http), [], []
        for name in sessions:
            http.post("/step", json={"action": {"by": 3}}, headers={"X-OpenEnv-Session": name})
            answer = http.post(f"/sessions/{name}/fork", json={"n": 1})
            assert answer.status_code == 200, answer.text
            copies.append(answer.json()["sessions"][0]["session_id"])
            tokens.append(answer.json()["sessions"][0]["token"])
        assert [worker_of(name) for name in copies] == [worker_of(name) for name in sessions]
        for name, total in zip((*copies, *copies, *sessions), (4, 4, 5, 5, 4, 4), strict=True):
            seen = http.post("/step", json={"action": {"by": 1}}, headers={"X-OpenEnv-Session": name}).json()
            assert seen["observation"]["total"] == total
        near = http.post(f"/sessions/{sessions[0]}/restore", json={"token": tokens[0]})
        assert near.status_code == 200, near.text
        far = http.post(f"/sessions/{sessions[0]}/restore", json={"token": tokens[1]})
        assert (far.status_code, far.json()["code"]) == (421, "SESSION_ELSEWHERE")
        assert "of its own worker" in far.text
        seen = http.post("/step", json={"action": {"by": 1}}, headers={"X-OpenEnv-Session": sessions[0]}).json()
        assert seen["observation"]["total"] == 6
        close_sessions(http, *sessions, *copies)


def test_metrics_are_those_of_the_whole_server(server: WorkersServer) -> None:
    before = server.metric("openenv_steps_total") or 0
    resumes_before = server.metric("openenv_resumes_total") or 0
    clients = [server.client() for _ in range(2)]
    for client in clients:
        client.reset()
        for _ in range(4):
            client.step({"by": 1})
        client._driver._connection._socket.shutdown(socket.SHUT_RDWR)
        client.step({"by": 1})
    for _ in range(4):
        assert server.metric("openenv_steps_total") == before + 10
        assert server.metric("openenv_resumes_total") == resumes_before + 2
        assert server.metric("openenv_session_slots_used") == 2
        assert server.metric("openenv_session_slots") == 8
        assert server.metric("openenv_workers") == 2
    for client in clients:
        client.close()


def test_a_cancelled_request_and_a_client_that_hangs_up_free_what_they_took(server: WorkersServer) -> None:
    url = server.url.replace("http", "ws") + "/ws"
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(connect(url, subprotocols=["openenv.v2.json"], proxy=None))  # type: ignore[list-item]
            for _ in range(2)
        ]
        for peer in peers:
            peer.send('{"type":"open","id":1}')
            json.loads(peer.recv(timeout=60))
            peer.send('{"type":"reset","id":1,"data":{}}')
            json.loads(peer.recv(timeout=60))
            peer.send('{"type":"step","id":2,"data":{"sleep_s":0.3}}')
            peer.send('{"type":"step","id":3,"data":{"by":100}}')
            peer.send('{"type":"cancel","id":4,"request":3}')
        for peer in peers:
            replies: dict[int, Any] = {}
            while not {2, 3} <= replies.keys():
                reply = json.loads(peer.recv(timeout=60))
                replies[reply.get("id")] = reply
            assert replies[3]["data"]["code"] == "CANCELLED"
            peer.send('{"type":"close","id":5}')


def test_a_name_that_no_worker_has_made_is_unknown(server: WorkersServer) -> None:
    with http_calls.Client(base_url=server.url) as http:
        for name in ("no-such-session", "9b0e-w7-1", "9b0e-w1-9", "9b0e-w0-1"):
            answer = http.post("/step", json={"action": {}}, headers={"X-OpenEnv-Session": name})
            assert (answer.status_code, answer.json()["code"]) == (404, "SESSION_NOT_FOUND")


@pytest.mark.slow
def test_the_http_client_plays_two_episodes_at_once(server: WorkersServer) -> None:
    with DictHTTPClient(server.url) as one, DictHTTPClient(server.url) as other:
        assert one.reset().observation["pid"] != other.reset().observation["pid"]
        for turn in range(1, 4):
            assert one.step({"by": 1}).observation["total"] == turn
            assert other.step({"by": 2}).observation["total"] == 2 * turn


@pytest.mark.slow
def test_many_clients_at_once_lose_nothing(server: WorkersServer) -> None:
    def play(number: int) -> list[int]:
        with GenericEnvClient(server.url).sync() as client:
            client.reset()
            return [client.step({"by": number}).observation["total"] for _ in range(20)]

    began = threading.Barrier(8)

    def together(number: int) -> list[int]:
        began.wait(60)
        return play(number)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(together, range(8))) == [[number * turn for turn in range(1, 21)] for number in range(8)]


@pytest.mark.slow
def test_a_session_that_is_lost_says_so_and_never_resets_silently(server: WorkersServer) -> None:
    with server.client() as client:
        client.reset()
        client.step({"by": 1})
        session = http_calls.get(f"{server.url}/web/sessions").json()["sessions"][0]["session_id"]
        http_calls.delete(f"{server.url}/web/sessions/{session}")
        with pytest.raises(SessionLost):
            client.step({"by": 1})
        assert client.reset().observation["total"] == 0


def test_programs_that_an_environment_starts_inherit_nothing_of_the_server(server: WorkersServer) -> None:
    with server.client() as client:
        pid = client.reset().observation["pid"]
        for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
            if int(entry.name) > 2:
                flags = int(re.search(r"flags:\s+(\d+)", entry.read_text())[1], 8)  # type: ignore[index]
                assert flags & os.O_CLOEXEC, os.readlink(f"/proc/{pid}/fd/{entry.name}")


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_killed_worker_loses_its_sessions_with_a_typed_error_and_no_others(server: WorkersServer) -> None:
    clients = [server.client() for _ in range(4)]
    pids = [client.reset().observation["pid"] for client in clients]
    assert Counter(Counter(pids).values()) == {2: 2}
    for client in clients:
        client.step({"by": 1})
    killed = pids[0]
    lost_before = server.metric('openenv_sessions_closed_total{reason="worker crashed"}') or 0
    steps_before = server.metric("openenv_steps_total") or 0
    with ThreadPoolExecutor(4) as pool:
        steps = [pool.submit(client.step, {"by": 1, "sleep_s": 0.6}) for client in clients]
        holds_for(0.3, lambda: not any(step.done() for step in steps))  # all of them are with a worker
        os.kill(killed, signal.SIGKILL)
        for pid, step in zip(pids, steps, strict=True):
            if pid == killed:
                with pytest.raises(SessionLost) as lost:
                    step.result(60)
                assert lost.value.reason == "worker crashed"
            else:
                assert step.result(60).observation["total"] == 2
    for pid, client in zip(pids, clients, strict=True):
        if pid == killed:
            with pytest.raises(SessionLost):  # only a reset begins another episode
                client.step({"by": 1})
            assert client.reset().observation["total"] == 0
        else:
            assert client.step({"by": 1}).observation["total"] == 3
    server.wait_for(lambda: server.metric("openenv_workers") == 2)
    assert server.metric('openenv_sessions_closed_total{reason="worker crashed"}') == lost_before + 2
    assert (server.metric("openenv_steps_total") or 0) >= steps_before  # counters never fall
    for client in clients:
        client.close()


@pytest.mark.slow
def test_a_drain_finishes_running_steps_in_all_workers(server: WorkersServer) -> None:
    clients = [server.client() for _ in range(2)]
    pids = {client.reset().observation["pid"] for client in clients}
    assert len(pids) == 2
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(client.step, {"by": 7, "sleep_s": 1.0}) for client in clients]
        holds_for(0.3, lambda: not any(step.done() for step in steps))  # all of them are with a worker
        assert server.stop() == 0
        assert [step.result(60).observation["total"] for step in steps] == [7, 7]
    assert not any(is_running(pid) for pid in pids)
