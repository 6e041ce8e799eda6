"""A second manifest: several processes behave as one server. Each test runs with workers and with a gateway.

Their ways to share differ (workers pass connections on, a gateway requests); tests of that are in `tests/server`.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from websockets.sync.client import connect

import http_calls
from behaviours import Manifest
from gateways import ChangingBackends, RunningGateway, counting_app
from http_calls import close_sessions, open_session
from openenv import GenericEnvClient, VectorEnv
from openenv.client.vector.results import VectorResult
from openenv.errors import SessionCapacityError
from openenv.server.sessions.peers import boot_of
from openenv.server.workers.board import place_of
from servers import RunningServer
from waiting import wait_until
from worker_servers import WorkersServer

MANIFEST = {
    "spread": "new sessions go to the process with the fewest, with either protocol",
    "resume": "a client whose connection was cut finds its session in its process",
    "connection": "one HTTP connection carries requests of sessions in both processes",
    "ahead": "requests sent ahead on one connection are answered in order, each by its own process",
    "mcp": "MCP sessions of both eras and JSON-RPC sessions reach their process",
    "page": "visitors of the page keep their process; an operator sees and ends all sessions",
    "vector": "a vector is spread over the processes and resumes",
    "copies": "copies of a slot of a vector stay in its process and go on from where it is",
    "open": "a repeated open or key gets the session that the first one opened",
    "full": "a full server refuses over every transport; errors of a session pass as they are",
}
behaviour = Manifest(MANIFEST)
SLOTS = 8
"""Of the whole server."""


class Site:
    """Two processes (or servers in threads) that act as one server of eight sessions.

    Args:
        url: Where it listens.
        place: Tells from the name of a session which process has it.
        refusal: The counts in its refusal when it is full. A gateway passes on those of one server.
    """

    def __init__(self, url: str, place: Callable[[str], Any], refusal: tuple[int, int]) -> None:
        self.url = url
        self.place = place
        self.refusal = refusal

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def client(self, **options: Any) -> Any:
        return GenericEnvClient(self.url, **options).sync()

    def http(self) -> httpx2.Client:
        return http_calls.Client(base_url=self.url)


def worker_of(name: str) -> int:
    place = place_of(name)
    assert place is not None
    return place.index


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkersServer]:
    server = WorkersServer("--workers", "2", "--max-sessions", str(SLOTS), "--grace", "30")
    yield server
    server.end()


@pytest.fixture(scope="module")
def servers(serve_once: Callable[..., RunningServer]) -> list[RunningServer]:
    return [serve_once(counting_app(name, max_concurrent_envs=SLOTS // 2)) for name in ("red", "blue")]


@pytest.fixture(scope="module")
def gateway(servers: list[RunningServer]) -> Iterator[RunningGateway]:
    gateway = RunningGateway(ChangingBackends([server.url for server in servers]))
    yield gateway
    gateway.stop()


@pytest.fixture(params=["workers", "gateway"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Each way to be one server; after the test no session is left."""
    if request.param == "workers":
        workers: WorkersServer = request.getfixturevalue("workers")
        yield Site(workers.url, worker_of, (SLOTS, SLOTS))
        workers.wait_for(lambda: workers.ready["active_sessions"] == 0)
        return
    gateway: RunningGateway = request.getfixturevalue("gateway")
    servers: list[RunningServer] = request.getfixturevalue("servers")
    gateway.refresh()
    yield Site(gateway.url, boot_of, (SLOTS // 2, SLOTS // 2))
    wait_until(lambda: not any(server.manager.active for server in servers))
    wait_until(lambda: not gateway.gateway.sockets)


def home_of(seen: dict[str, Any]) -> tuple[int, str]:
    """The process that an observation names, and the server in it."""
    return seen["pid"], seen["server"]


def one_of_each(site: Site, http: httpx2.Client) -> list[str]:
    """Open a session in each process."""
    names = [open_session(http) for _ in range(2)]
    assert len({site.place(name) for name in names}) == 2
    return names


def stepped(http: httpx2.Client, name: str, by: int = 1) -> dict[str, Any]:
    response = http.post("/step", json={"action": {"by": by}}, headers={"X-OpenEnv-Session": name})
    assert response.status_code == 200, response.text
    seen: dict[str, Any] = response.json()["observation"]
    return seen


def seen_by(result: VectorResult[Any]) -> list[Any]:
    """The observations of all slots, which there have to be."""
    assert all(seen is not None for seen in result.observations)
    return list(result.observations)


def halves(homes: Sequence[Any]) -> None:
    """Check that each of two processes has half of the sessions."""
    assert list(Counter(homes).values()) == [len(homes) // 2] * 2, homes


@behaviour("spread")
@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_new_sessions_go_to_the_process_with_the_fewest(site: Site, protocol: Any) -> None:
    clients = [site.client(protocol=protocol) for _ in range(4)]
    halves([home_of(client.reset().observation) for client in clients])
    assert [client.step({"by": 5}).observation["total"] for client in clients] == [5] * 4
    for client in clients:
        client.close()


@behaviour("resume")
def test_a_client_finds_its_session_again_whoever_gets_the_new_connection(site: Site) -> None:
    clients = [site.client() for _ in range(4)]
    homes = [home_of(client.reset().observation) for client in clients]
    for turn in range(1, 4):
        for client, home in zip(clients, homes, strict=True):
            client._driver._connection._socket.shutdown(socket.SHUT_RDWR)
            seen = client.step({"by": 1}).observation
            assert (seen["total"], home_of(seen)) == (turn, home)
    for client in clients:
        client.close()


@behaviour("connection")
def test_one_connection_carries_requests_of_sessions_in_both_processes(site: Site) -> None:
    with site.http() as http:
        names = one_of_each(site, http)
        homes = [home_of(stepped(http, name)) for name in names]
        assert len(set(homes)) == 2
        for turn in range(2, 6):
            for name, home in zip(names, homes, strict=True):
                seen = stepped(http, name)
                assert (seen["total"], home_of(seen)) == (turn, home)
                assert http.get("/state", headers={"X-OpenEnv-Session": name}).json()["step_count"] == turn
        assert [http.get(f"/sessions/{name}").json()["step_count"] for name in names] == [5, 5]
        for name in names:
            pieces = iter([b'{"action":', b'{"by": 5}}'])
            headers = {"X-OpenEnv-Session": name, "content-type": "application/json"}
            assert http.post("/step", content=pieces, headers=headers).json()["observation"]["total"] == 10
        large = {"action": {"by": 1, "padding": "x" * 2_000_000}}
        seen = http.post("/step", json=large, headers={"X-OpenEnv-Session": names[1]}).json()["observation"]
        assert (seen["total"], len(seen["padding"])) == (11, 2_000_000)
        close_sessions(http, *names)
        gone = http.post("/step", json={"action": {}}, headers={"X-OpenEnv-Session": names[1]})
        assert (gone.status_code, gone.json()["code"]) == (410, "SESSION_LOST")
        assert http.head("/health").text == http.head("/docs").text == ""


@behaviour("ahead")
def test_requests_sent_ahead_are_answered_in_order_by_their_own_processes(site: Site) -> None:
    with site.http() as http:
        names = one_of_each(site, http)
        body = b'{"action":{"by":1}}'
        requests = b"".join(
            b"POST /step HTTP/1.1\r\nHost: x\r\nX-OpenEnv-Session: %s\r\nContent-Length: %d\r\n\r\n%s"
            % (names[turn % 2].encode(), len(body), body)
            for turn in range(6)
        )
        with socket.create_connection(site.address, timeout=60) as raw:
            for start in range(0, len(requests), 97):  # in pieces that end anywhere
                raw.sendall(requests[start : start + 97])
            received = b""
            while received.count(b'"padding":') < 6:
                chunk = raw.recv(65536)
                assert chunk, received
                received += chunk
        assert received.count(b"HTTP/1.1 200") == 6
        totals = [json.loads(part.split(b",")[0]) for part in received.split(b'"total":')[1:]]
        homes = [part.split(b',"padding"')[0] for part in received.split(b'"pid":')[1:]]
        assert totals == [1, 1, 2, 2, 3, 3]
        assert len(set(homes)) == 2
        assert homes == homes[:2] * 3
        close_sessions(http, *names)


@behaviour("mcp")
def test_mcp_sessions_of_both_eras_and_json_rpc_reach_their_process(site: Site) -> None:
    both = {"accept": "application/json, text/event-stream"}
    with site.http() as http:

        def call(method: str, params: dict[str, Any], **headers: str) -> httpx2.Response:
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return http.post("/mcp", json=message, headers=headers)

        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        mcp = [call("initialize", hello, **both).headers["mcp-session-id"] for _ in range(2)]
        rpc = [call("openenv/session/create", {}).json()["result"]["session_id"] for _ in range(2)]
        assert {site.place(name) for name in mcp} == {site.place(name) for name in rpc}
        assert len({site.place(name) for name in mcp}) == 2
        for turn in range(1, 4):
            for name in mcp:
                result = call("tools/call", {"name": "add", "arguments": {"by": 1}}, **both, **{"mcp-session-id": name})
                assert result.json()["result"]["content"][0]["text"] == str(turn)
            for name in rpc:
                arguments = {"by": 1, "session_id": rpc[0]}  # the message itself decides
                result = call("tools/call", {"name": "add", "arguments": arguments, "session_id": name})
                assert str(turn) in json.dumps(result.json()["result"])
        for name in mcp:
            assert http.delete("/mcp", headers={"mcp-session-id": name}).status_code == 200
        for name in rpc:
            assert call("openenv/session/close", {"session_id": name}).json()["result"]["closed"]


@behaviour("page")
def test_visitors_of_the_page_keep_their_process_and_an_operator_sees_and_ends_all_sessions(site: Site) -> None:
    visitors = [site.http() for _ in range(4)]
    for visitor in visitors:
        assert visitor.get("/web/").status_code == 200
        visitor.post("/web/reset", json={})
    assert len({site.place(visitor.cookies["openenv_visitor"]) for visitor in visitors}) == 2
    for turn in range(1, 4):
        for visitor in visitors:
            assert visitor.post("/web/step", json={"action": {"by": 1}}).json()["observation"]["total"] == turn
    cookie = {"cookie": f"openenv_visitor={visitors[3].cookies['openenv_visitor']}"}
    with connect(f"{site.ws_url}/ws/ui", additional_headers=cookie, proxy=None) as peer:
        assert json.loads(peer.recv(timeout=60))["episode_state"]["step_count"] == 3
    listed = visitors[0].get("/web/sessions").json()
    assert listed["capacity"]["active"] == len(listed["sessions"]) == 4
    assert listed["capacity"]["max"] == SLOTS
    assert sum(one["is_mine"] for one in listed["sessions"]) == 1
    for one in listed["sessions"]:
        assert visitors[0].delete(f"/web/sessions/{one['session_id']}").status_code == 200
    lost = visitors[3].post("/web/step", json={"action": {"by": 1}})
    assert (lost.status_code, lost.json()["reason"]) == (410, "ended by an operator")
    for visitor in visitors:
        visitor.close()


@behaviour("vector")
def test_a_vector_is_spread_over_the_processes_and_resumes(site: Site) -> None:
    with VectorEnv[Any, Any](site.url, SLOTS) as vector:
        halves([home_of(seen) for seen in seen_by(vector.reset())])
        for turn in range(1, 4):
            seen = seen_by(vector.step([{"by": index} for index in range(SLOTS)]))
            assert [one["total"] for one in seen] == [turn * index for index in range(SLOTS)]
        for shared in vector._pool.connections:
            shared.connection._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        seen = seen_by(vector.step([{"by": index} for index in range(SLOTS)]))
        assert [one["total"] for one in seen] == [4 * index for index in range(SLOTS)]


@behaviour("copies")
def test_copies_of_a_slot_of_a_vector_stay_with_it_and_go_on_from_where_it_is(site: Site) -> None:
    with VectorEnv[Any, Any](site.url, 2) as vector:
        vector.reset()
        vector.step([{"by": 1}, {"by": 10}])
        for slot, total in ((0, 1), (1, 10)):
            with vector.fork(slot, 3) as copies:
                assert {site.place(name) for name in copies.sessions if name} == {
                    site.place(vector.sessions[slot] or "")
                }
                assert [seen["total"] for seen in seen_by(copies.step([{"by": 5}] * 3))] == [total + 5] * 3
        assert [seen["total"] for seen in seen_by(vector.step([{"by": 1}, {"by": 10}]))] == [2, 20]


@behaviour("open")
def test_a_repeated_open_gets_the_session_that_the_first_one_opened(site: Site) -> None:
    names = set()
    for _ in range(6):
        with connect(f"{site.ws_url}/ws", subprotocols=["openenv.v2.json"], proxy=None) as peer:  # type: ignore[list-item]
            assert peer.response is not None
            assert peer.response.headers["x-openenv-workers"] == "2"
            peer.send(json.dumps({"type": "open", "id": 1, "nonce": "n" * 32}))
            names.add(json.loads(peer.recv(timeout=60))["session"])
            peer.socket.shutdown(socket.SHUT_RDWR)
    assert len(names) == 1
    with site.http() as http:
        keyed = {open_session(http, **{"Idempotency-Key": "k" * 32}) for _ in range(4)}
        assert len(keyed) == 1
        close_sessions(http, *keyed)
        assert http.delete(f"/web/sessions/{names.pop()}").status_code == 200


@behaviour("full")
def test_a_full_server_refuses_over_every_transport(site: Site) -> None:
    with site.http() as http:
        names = [open_session(http) for _ in range(SLOTS)]
        halves([site.place(name) for name in names])
        for _ in range(4):  # in any process
            refused = http_calls.post(f"{site.url}/sessions", json={})
            assert (refused.status_code, refused.json()["code"]) == (503, "CAPACITY_REACHED")
            assert (refused.json()["active_sessions"], refused.json()["max_sessions"]) == site.refusal
            assert refused.headers["retry-after"] == "1"
        for protocol in ("v1", "v2"):
            with pytest.raises(SessionCapacityError):
                site.client(protocol=protocol).reset()
        invalid = http.post("/step", json={"action": {"by": "much"}}, headers={"X-OpenEnv-Session": names[0]})
        assert invalid.status_code == 422
        close_sessions(http, *names)


def test_every_behaviour_of_the_manifest_has_its_test() -> None:
    behaviour.check()
