"""What an agent does with a session that an orchestrator has lent it neither ends it nor shortens its life."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from websockets.sync.client import connect

from environments import Greeter
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.sessions.lifetime import life_s
from servers import RunningServer, Serve

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
TRAINER = {"authorization": "Bearer trainer-token"}
AGENT = {"authorization": "Bearer agent-token"}


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    policy = AccessPolicy(orchestrator="trainer-token", agent="agent-token")
    return serve(create_app(Greeter, CallToolAction, CallToolObservation, max_concurrent_envs=4, access=policy))


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    accepted = {"accept": "application/json, text/event-stream"}
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=30, headers=accepted) as client:
        yield client


def test_an_agent_cannot_end_a_session_that_an_orchestrator_has_opened_over_mcp(
    server: RunningServer, http: httpx2.Client
) -> None:
    name = {"mcp-session-id": http.post("/mcp", json=HELLO, headers=TRAINER).headers["mcp-session-id"]}
    refused = http.delete("/mcp", headers={**AGENT, **name})
    assert refused.status_code == 403
    assert server.manager.active == 1
    assert http.delete("/mcp", headers={**TRAINER, **name}).status_code == 200
    server.wait_for(lambda: server.manager.active == 0)


def test_an_agent_ends_what_it_has_opened_itself_and_leaves_what_it_was_lent(
    server: RunningServer, http: httpx2.Client
) -> None:
    lent = http.post("/sessions", headers=TRAINER).json()["session_id"]
    own = http.post("/mcp", json=HELLO, headers=AGENT).headers["mcp-session-id"]
    shown = http.post("/mcp", json=HELLO, headers={**AGENT, "X-OpenEnv-Session": lent}).headers["mcp-session-id"]
    for name in (own, shown):
        assert http.delete("/mcp", headers={**AGENT, "mcp-session-id": name}).status_code == 200
    server.wait_for(lambda: server.manager.active == 1)
    assert http.get(f"/sessions/{lent}", headers=TRAINER).status_code == 200


@pytest.mark.parametrize(("who", "is_shortened"), [(AGENT, False), (TRAINER, True)], ids=["agent", "orchestrator"])
def test_a_socket_that_goes_shortens_the_life_of_its_own_clients_session_only(
    server: RunningServer, http: httpx2.Client, who: dict[str, str], is_shortened: bool
) -> None:
    lent = http.post("/sessions", headers=TRAINER).json()["session_id"]
    session = server.manager.find(lent)
    address = f"ws://127.0.0.1:{server.port}/mcp?session_id={lent}"
    with connect(address, additional_headers=who, proxy=None):
        server.wait_for(lambda: session.is_attached)
    server.wait_for(lambda: not session.is_attached)
    limits = server.manager.limits
    assert life_s(session, limits) == (limits.soft_idle_s if is_shortened else limits.idle_s)
