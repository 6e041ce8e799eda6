"""Limits of agents, tokens and evictions with two workers: those of one server, in any worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import http_calls
from openenv import GenericEnvClient
from openenv.errors import AccessDenied
from openenv.server.workers.board import place_of
from worker_servers import WorkersServer

TRAINER = {"Authorization": "Bearer trainer"}
AGENT = {"Authorization": "Bearer agent"}
SLOTS = 4
pytestmark = pytest.mark.slow  # of the limits, `test_one_server` has the quick one


@pytest.fixture(scope="module")
def server() -> Iterator[WorkersServer]:
    """Two workers, four slots, and tokens for two roles."""
    served = WorkersServer(
        "--workers", "2", "--max-sessions", str(SLOTS), "--token", "trainer", "--agent-token", "agent"
    )
    yield served
    served.end()


def worker_of(name: str) -> int:
    place = place_of(name)
    assert place is not None
    return place.index


def rpc(server: WorkersServer, method: str, params: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    answer: dict[str, Any] = http_calls.post(f"{server.url}/mcp", json=message, headers=headers).json()
    return answer


def opened(server: WorkersServer) -> httpx2.Response:
    answer: httpx2.Response = http_calls.post(f"{server.url}/sessions", json={}, headers=TRAINER)
    return answer


def close(server: WorkersServer, *names: str) -> None:
    for name in names:
        assert http_calls.delete(f"{server.url}/sessions/{name}", headers=TRAINER).status_code == 200


def closed(server: WorkersServer, reason: str) -> float:
    """Return how many sessions have ended so."""
    text = http_calls.get(f"{server.url}/metrics", headers=TRAINER).text
    lines = [line for line in text.splitlines() if line.startswith("openenv_sessions_closed_total") and reason in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def active(server: WorkersServer) -> int:
    """Return how many slots are taken."""
    return int(http_calls.get(f"{server.url}/ready").json()["active_sessions"])


def test_a_client_of_one_worker_gets_the_slot_of_a_visitor_of_the_other(server: WorkersServer) -> None:
    server.wait_for(lambda: active(server) == 0)
    before = closed(server, "evicted")
    with http_calls.Client(base_url=server.url, headers=TRAINER) as http:
        visitors = set()
        for _ in range(SLOTS):  # on one connection, so all in the worker that has it
            assert http.post("/reset", json={}).status_code == 200
            visitors.add(http.cookies["openenv_session"])
            http.cookies.clear()
    assert len(visitors) == active(server) == SLOTS
    assert len({worker_of(name) for name in visitors}) == 1
    answers = [opened(server) for _ in range(SLOTS)]
    assert [answer.status_code for answer in answers] == [201] * SLOTS
    names = [answer.json()["session_id"] for answer in answers]
    assert worker_of(names[0]) not in {worker_of(name) for name in visitors}
    assert closed(server, "evicted") - before == SLOTS
    assert opened(server).status_code == 503  # an explicit session is not evicted
    close(server, *names)


def test_every_worker_asks_for_the_token_and_knows_the_roles(server: WorkersServer) -> None:
    server.wait_for(lambda: active(server) == 0)
    for _ in range(4):
        assert http_calls.post(f"{server.url}/sessions", json={}).status_code == 401
        assert http_calls.post(f"{server.url}/sessions", json={}, headers=AGENT).status_code == 403
    with pytest.raises(AccessDenied):
        server.client().reset()
    # A request that was refused may count as load of its worker for a moment, so two sessions may go to one.
    clients = [GenericEnvClient(server.url, token="trainer").sync() for _ in range(SLOTS)]
    assert len({client.reset().observation["pid"] for client in clients}) == 2
    for client in clients:
        client.close()


def test_agents_of_all_workers_together_leave_a_slot_to_the_orchestrator(server: WorkersServer) -> None:
    server.wait_for(lambda: active(server) == 0)
    names = [rpc(server, "openenv/session/create", {}, AGENT)["result"]["session_id"] for _ in range(SLOTS - 1)]
    assert {worker_of(name) for name in names} == {0, 1}
    for _ in range(4):  # in any worker
        assert "agents" in rpc(server, "openenv/session/create", {}, AGENT)["error"]["message"]
    own = opened(server)
    assert own.status_code == 201
    assert opened(server).status_code == 503
    close(server, names[0])
    server.wait_for(lambda: active(server) == SLOTS - 1)
    names[0] = rpc(server, "openenv/session/create", {}, AGENT)["result"]["session_id"]
    close(server, own.json()["session_id"], *names)
