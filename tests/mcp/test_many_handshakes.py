"""A client that shakes hands again and again over one session does not fill the server's memory."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from environments import Greeter
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.app import create_app
from openenv.server.mcp.mcp_sessions import MAX_ATTACHED
from servers import RunningServer, Serve

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    return serve(create_app(Greeter, CallToolAction, CallToolObservation, max_concurrent_envs=4))


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    accepted = {"accept": "application/json, text/event-stream"}
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=30, headers=accepted) as client:
        yield client


def test_the_oldest_of_many_handshakes_over_one_session_are_forgotten(
    server: RunningServer, http: httpx2.Client
) -> None:
    name = http.post("/sessions").json()["session_id"]
    own = http.post("/mcp", json=HELLO).headers["mcp-session-id"]
    clients = [
        http.post("/mcp", json=HELLO, headers={"X-OpenEnv-Session": name}).headers["mcp-session-id"]
        for _ in range(MAX_ATTACHED + 20)
    ]
    known = server.app.state.openenv_server._mcp.sessions._known
    assert len(known) == MAX_ATTACHED + 1
    statuses = [http.post("/mcp", json=LIST, headers={"mcp-session-id": client}).status_code for client in clients]
    assert statuses == [404] * 20 + [200] * MAX_ATTACHED
    assert http.post("/mcp", json=LIST, headers={"mcp-session-id": own}).status_code == 200
    assert http.get(f"/sessions/{name}").json()["state"] == "ready"


def test_a_handshake_with_an_open_stream_is_not_forgotten(server: RunningServer, http: httpx2.Client) -> None:
    name = http.post("/sessions").json()["session_id"]
    first = http.post("/mcp", json=HELLO, headers={"X-OpenEnv-Session": name}).headers["mcp-session-id"]
    stream = {"mcp-session-id": first, "accept": "text/event-stream"}
    with http.stream("GET", "/mcp", headers=stream) as answer:
        assert answer.status_code == 200
        for _ in range(MAX_ATTACHED + 5):
            http.post("/mcp", json=HELLO, headers={"X-OpenEnv-Session": name})
        assert http.post("/mcp", json=LIST, headers={"mcp-session-id": first}).status_code == 200
