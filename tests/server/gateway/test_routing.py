"""Clients of a gateway reach the server that has their session, over every transport, as if it were one server."""

from __future__ import annotations

import json
import socket
from collections import Counter
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

import http_calls
from gateways import RunningGateway
from openenv import GenericEnvClient, VectorEnv
from openenv.errors import SessionCapacityError
from openenv.server.sessions.peers import boot_of
from servers import RunningServer
from waiting import wait_until

NEW = {"X-OpenEnv-Session": "new"}


def client_of(gateway: RunningGateway, **options: Any) -> Any:
    return GenericEnvClient(gateway.url, **options).sync()


def opened(http: httpx2.Client, **headers: str) -> str:
    """Open a session over HTTP; return its id."""
    response = http.post("/reset", json={}, headers={**NEW, **headers})
    assert response.status_code == 200, response.text
    return str(response.headers["x-openenv-session"])


def stepped(http: httpx2.Client, name: str, by: int = 1) -> dict[str, Any]:
    response = http.post("/step", json={"action": {"by": by}}, headers={"X-OpenEnv-Session": name})
    assert response.status_code == 200, response.text
    seen: dict[str, Any] = response.json()["observation"]
    return seen


def close(http: httpx2.Client, *names: str) -> None:
    for name in names:
        assert http.delete(f"/sessions/{name}").status_code == 200


def test_new_sessions_go_to_the_least_loaded_server_and_are_resumed_there(gateway: RunningGateway) -> None:
    clients = [client_of(gateway) for _ in range(4)]
    try:
        homes = [client.reset().observation["server"] for client in clients]
        assert Counter(homes) == {"red": 2, "blue": 2}
        for turn in range(1, 4):
            for client, home in zip(clients, homes, strict=True):
                client._driver._connection._socket.shutdown(socket.SHUT_RDWR)
                seen = client.step({"by": 1}).observation
                assert (seen["total"], seen["server"]) == (turn, home)
    finally:
        for client in clients:
            client.close()


def test_sessions_of_protocol_v1_are_spread_too(gateway: RunningGateway) -> None:
    clients = [client_of(gateway, protocol="v1") for _ in range(4)]
    try:
        assert Counter(client.reset().observation["server"] for client in clients) == {"red": 2, "blue": 2}
        assert [client.step({"by": 5}).observation["total"] for client in clients] == [5] * 4
    finally:
        for client in clients:
            client.close()


def test_load_that_did_not_come_through_the_gateway_counts(
    gateway: RunningGateway, servers: list[RunningServer]
) -> None:
    with http_calls.Client(base_url=servers[0].url) as beside, http_calls.Client(base_url=gateway.url) as http:
        others = [opened(beside) for _ in range(3)]
        gateway.refresh()
        names = [opened(http) for _ in range(3)]
        assert {stepped(http, name)["server"] for name in names} == {"blue"}
        assert {stepped(http, name)["server"] for name in others} == {"red"}  # the id is enough
        close(http, *names, *others)


def test_one_http_connection_carries_requests_for_sessions_of_both_servers(gateway: RunningGateway) -> None:
    with http_calls.Client(base_url=gateway.url) as http:
        names = [opened(http) for _ in range(2)]
        homes = [stepped(http, name)["server"] for name in names]
        assert set(homes) == {"red", "blue"}
        for turn in range(2, 6):
            for name, home in zip(names, homes, strict=True):
                seen = stepped(http, name)
                assert (seen["total"], seen["server"]) == (turn, home)
                assert http.get("/state", headers={"X-OpenEnv-Session": name}).json()["step_count"] == turn
        pieces = [b'{"action":', b'{"by": 5}}']
        headers = {"X-OpenEnv-Session": names[0], "content-type": "application/json"}
        assert http.post("/step", content=iter(pieces), headers=headers).json()["observation"]["total"] == 10
        large = {"action": {"by": 1, "padding": "x" * 2_000_000}}
        seen = http.post("/step", json=large, headers={"X-OpenEnv-Session": names[1]}).json()["observation"]
        assert (seen["total"], len(seen["padding"])) == (6, 2_000_000)
        close(http, *names)
        gone = http.post("/step", json={"action": {}}, headers={"X-OpenEnv-Session": names[1]})
        assert (gone.status_code, gone.json()["code"]) == (410, "SESSION_LOST")
        assert http.head("/health").text == http.head("/docs").text == ""


def test_requests_sent_ahead_are_answered_in_order_by_their_own_servers(gateway: RunningGateway) -> None:
    with http_calls.Client(base_url=gateway.url) as http:
        names = [opened(http) for _ in range(2)]
        body = b'{"action":{"by":1}}'
        requests = b"".join(
            b"POST /step HTTP/1.1\r\nHost: x\r\nX-OpenEnv-Session: %s\r\nContent-Length: %d\r\n\r\n%s"
            % (names[turn % 2].encode(), len(body), body)
            for turn in range(6)
        )
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as raw:
            for begin in range(0, len(requests), 97):  # in pieces that end anywhere
                raw.sendall(requests[begin : begin + 97])
            received = b""
            while received.count(b'"total":') < 6:
                chunk = raw.recv(65536)
                assert chunk, received
                received += chunk
        totals = [json.loads(part.split(b",")[0]) for part in received.split(b'"total":')[1:]]
        homes = [part.split(b'"')[0] for part in received.split(b'"server":"')[1:]]
        assert totals == [1, 1, 2, 2, 3, 3]
        assert len(set(homes)) == 2
        assert homes == homes[:2] * 3
        close(http, *names)


def test_mcp_sessions_of_both_kinds_reach_their_server(gateway: RunningGateway) -> None:
    both = {"accept": "application/json, text/event-stream"}
    with http_calls.Client(base_url=gateway.url) as http:

        def call(method: str, params: dict[str, Any], **headers: str) -> httpx2.Response:
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return http.post("/mcp", json=message, headers=headers)

        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        mcp = [call("initialize", hello, **both).headers["mcp-session-id"] for _ in range(2)]
        rpc = [call("openenv/session/create", {}).json()["result"]["session_id"] for _ in range(2)]
        assert {boot_of(name) for name in mcp} == {boot_of(name) for name in rpc}
        assert len({boot_of(name) for name in mcp}) == 2
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


def test_visitors_of_the_page_keep_their_server_and_operators_see_all_sessions(
    gateway: RunningGateway,
) -> None:
    visitors = [http_calls.Client(base_url=gateway.url) for _ in range(2)]
    for visitor in visitors:
        assert visitor.get("/web/").status_code == 200
        visitor.post("/web/reset", json={})
    assert len({boot_of(visitor.cookies["openenv_visitor"]) for visitor in visitors}) == 2
    for turn in range(1, 3):
        for visitor in visitors:
            assert visitor.post("/web/step", json={"action": {"by": 1}}).json()["observation"]["total"] == turn
    key = visitors[1].cookies["openenv_visitor"]
    address = gateway.url.replace("http", "ws")
    with connect(f"{address}/ws/ui", additional_headers={"cookie": f"openenv_visitor={key}"}, proxy=None) as peer:
        assert json.loads(peer.recv(timeout=60))["episode_state"]["step_count"] == 2
    listed = visitors[0].get("/web/sessions").json()
    assert listed["capacity"]["active"] == len(listed["sessions"]) == 2
    assert listed["capacity"]["max"] == 16
    assert sum(one["is_mine"] for one in listed["sessions"]) == 1
    for one in listed["sessions"]:
        assert visitors[0].delete(f"/web/sessions/{one['session_id']}").status_code == 200
    for visitor in visitors:
        visitor.close()


def test_a_vector_of_sessions_is_spread_over_the_servers(gateway: RunningGateway) -> None:
    def seen_by(result: Any) -> list[Any]:
        assert all(seen is not None for seen in result.observations)
        return list(result.observations)

    with VectorEnv[Any, Any](gateway.url, 8) as vector:
        assert Counter(seen["server"] for seen in seen_by(vector.reset())) == {"red": 4, "blue": 4}
        for turn in range(1, 3):
            seen = seen_by(vector.step([{"by": index} for index in range(8)]))
            assert [one["total"] for one in seen] == [turn * index for index in range(8)]
        for shared in vector._pool.connections:
            shared.connection._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        seen = seen_by(vector.step([{"by": index} for index in range(8)]))
        assert [one["total"] for one in seen] == [3 * index for index in range(8)]


def test_a_repeated_open_gets_the_session_that_the_first_one_opened(gateway: RunningGateway) -> None:
    url = gateway.url.replace("http", "ws") + "/ws"
    names = set()
    for _ in range(4):
        with connect(url, subprotocols=["openenv.v2.json"], proxy=None) as peer:  # type: ignore[list-item]
            assert peer.response is not None
            assert peer.response.headers["x-openenv-workers"] == "2"
            peer.send(json.dumps({"type": "open", "id": 1, "nonce": "n" * 32}))
            names.add(json.loads(peer.recv(timeout=60))["session"])
            peer.socket.shutdown(socket.SHUT_RDWR)
    assert len(names) == 1
    with http_calls.Client(base_url=gateway.url) as http:
        keyed = {opened(http, **{"Idempotency-Key": "k" * 32}) for _ in range(4)}
        assert len(keyed) == 1
        close(http, *keyed)
        assert http.delete(f"/web/sessions/{names.pop()}").status_code == 200


def test_copies_stay_with_the_server_of_their_original(gateway: RunningGateway) -> None:
    with VectorEnv[Any, Any](gateway.url, 2) as vector:
        vector.reset()
        vector.step([{"by": 1}, {"by": 10}])
        for slot, total in ((0, 1), (1, 10)):
            with vector.fork(slot, 2) as copies:
                assert {boot_of(name) for name in copies.sessions if name} == {boot_of(vector.sessions[slot] or "")}
                seen = [one["total"] for one in copies.step([{"by": 5}] * 2).observations if one is not None]
                assert seen == [total + 5] * 2


def test_refusals_of_servers_pass_as_they_are(gateway: RunningGateway, servers: list[RunningServer]) -> None:
    with http_calls.Client(base_url=gateway.url) as http:
        names = [opened(http) for _ in range(16)]
        assert all(server.manager.active == 8 for server in servers)
        refused = http.post("/sessions", json={})
        assert (refused.status_code, refused.json()["code"]) == (503, "CAPACITY_REACHED")
        assert (refused.json()["active_sessions"], refused.headers["retry-after"]) == (8, "1")
        for protocol in ("v1", "v2"):
            with pytest.raises(SessionCapacityError):
                client_of(gateway, protocol=protocol).reset()
        invalid = http.post("/step", json={"action": {"by": "much"}}, headers={"X-OpenEnv-Session": names[0]})
        assert invalid.status_code == 422
        close(http, *names)


def test_the_gateway_answers_for_all_servers_together(gateway: RunningGateway, servers: list[RunningServer]) -> None:
    with http_calls.Client(base_url=gateway.url) as http:
        assert http.get("/health").json() == {"status": "healthy"}
        names = [opened(http) for _ in range(3)]
        wait_until(lambda: all(server.manager.active for server in servers))
        gateway.refresh()
        ready = http.get("/ready").json()
        assert ready == {
            "status": "ready",
            "active_sessions": 3,
            "max_sessions": 16,
            "servers": {"ready": 2, "draining": 0, "unreachable": 0},
        }
        text = http.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert (lines["openenv_session_slots_used"], lines["openenv_session_slots"]) == ("3", "16")
        assert lines['openenv_gateway_servers{state="ready"}'] == "2"
        close(http, *names)
