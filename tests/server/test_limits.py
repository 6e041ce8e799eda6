"""Where a server's limits come from, and what agents cannot use up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

import http_calls
from environments import Greeter
from openenv import GenericEnvClient
from openenv.errors import SessionCapacityError
from openenv.server.access import AccessPolicy
from openenv.server.app import HTTPEnvServer, create_app
from openenv.types import Action, ConcurrencyConfig, Observation
from servers import Serve

POLICY = AccessPolicy(orchestrator="trainer-token", agent="agent-token")
AGENT = {"Authorization": "Bearer agent-token"}
V2 = "openenv.v2.json"


# -- where they come from -------------------------------------------------------------------------------------------


def test_a_short_session_timeout_leaves_the_grace_period_as_it_is() -> None:
    server = HTTPEnvServer(Greeter, Action, Observation, concurrency_config=ConcurrencyConfig(session_timeout=5))
    assert (server.manager.limits.idle_s, server.manager.limits.grace_s) == (5, 60)


def test_the_settings_say_what_the_application_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_SESSION_GRACE", "12.5")
    monkeypatch.setenv("OPENENV_MAX_AGENT_SESSIONS", "3")
    limits = HTTPEnvServer(Greeter, Action, Observation).manager.limits
    assert (limits.grace_s, limits.agents) == (12.5, 3)
    own = HTTPEnvServer(Greeter, Action, Observation, session_grace_s=0, max_agent_sessions=1).manager.limits
    assert (own.grace_s, own.agents) == (0, 1)


@pytest.mark.parametrize("grace_s", [0.0, 7.5])
def test_clients_learn_the_grace_period(serve: Serve, grace_s: float) -> None:
    server = serve(create_app(Greeter, Action, Observation, session_grace_s=grace_s))
    with dial(server) as peer:
        assert ask(peer, type="open", id=1)["grace_s"] == grace_s
    if grace_s:
        assert server.manager.active == 1
    else:
        server.wait_for(lambda: server.manager.active == 0)


# -- what agents cannot use up --------------------------------------------------------------------------------------


def dial(server: Any, headers: dict[str, str] | None = None, path: str = "/ws", **options: Any) -> Any:
    offered: Any = {"subprotocols": [V2]} if path == "/ws" and "v1" not in options else {}
    return connect(f"ws://127.0.0.1:{server.port}{path}", additional_headers=headers, proxy=None, **offered)


def ask(peer: ClientConnection, **message: Any) -> dict[str, Any]:
    with suppress(ConnectionClosed):  # one that was refused has its reply already
        peer.send(json.dumps(message))
    reply: dict[str, Any] = json.loads(peer.recv(timeout=10))
    return reply


def by_v2(server: Any, stack: ExitStack) -> dict[str, Any]:
    return ask(stack.enter_context(dial(server, AGENT)), type="open", id=1)


def by_v1(server: Any, stack: ExitStack) -> dict[str, Any]:
    peer = stack.enter_context(dial(server, AGENT, v1=True))
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    return ask(peer, type="mcp", data=call)


def by_rpc_socket(server: Any, stack: ExitStack) -> dict[str, Any]:
    peer = stack.enter_context(dial(server, AGENT, path="/mcp"))
    return ask(peer, jsonrpc="2.0", id=1, method="tools/list")


def by_own_method(server: Any, stack: ExitStack) -> dict[str, Any]:
    return _post(server, {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"})


def by_handshake(server: Any, stack: ExitStack) -> dict[str, Any]:
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    return _post(server, {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})


def _post(server: Any, message: dict[str, Any]) -> dict[str, Any]:
    headers = dict(AGENT)
    if message["method"] == "initialize":
        headers["Accept"] = "application/json, text/event-stream"
    reply: dict[str, Any] = http_calls.post(f"{server.url}/mcp", json=message, headers=headers, trust_env=False).json()
    return reply


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is opened is closed with the test."""
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize("way", [by_v2, by_v1, by_rpc_socket, by_own_method, by_handshake])
def test_agents_leave_slots_to_the_orchestrator(
    serve: Serve, stack: ExitStack, way: Callable[[Any, ExitStack], dict[str, Any]]
) -> None:
    app = create_app(Greeter, Action, Observation, max_concurrent_envs=3, max_agent_sessions=2, access=POLICY)
    server = serve(app)
    for _ in range(2):
        reply = way(server, stack)
        assert reply.get("type") != "error", reply
        assert "error" not in reply, reply
    refused = json.dumps(way(server, stack))
    assert "reached its limit of sessions for agents" in refused
    assert server.manager.active == 2
    with GenericEnvClient(server.url, token="trainer-token").sync() as trainer:
        trainer.reset()
        assert server.manager.active == 3
        with pytest.raises(SessionCapacityError):
            GenericEnvClient(server.url, token="trainer-token").sync().reset()


@pytest.mark.parametrize("way", [by_v2, by_handshake])
def test_agents_leave_a_slot_to_the_orchestrator_where_no_limit_was_set(
    serve: Serve, stack: ExitStack, way: Callable[[Any, ExitStack], dict[str, Any]]
) -> None:
    server = serve(create_app(Greeter, Action, Observation, max_concurrent_envs=2, access=POLICY))
    assert "error" not in json.dumps(way(server, stack))
    assert "reached its limit of sessions for agents" in json.dumps(way(server, stack))
    listed = _post(server, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})  # a single request takes no slot
    assert "greet" in json.dumps(listed)
    with GenericEnvClient(server.url, token="trainer-token").sync() as trainer:
        trainer.reset()
        assert server.manager.active == 2


def test_the_only_slot_of_a_server_is_the_agents_too(serve: Serve, stack: ExitStack) -> None:
    server = serve(create_app(Greeter, Action, Observation, access=POLICY))
    assert by_v2(server, stack)["type"] == "opened"
    assert by_v2(server, stack)["data"]["code"] == "CAPACITY_REACHED"


def test_an_agent_waits_for_a_slot_that_agents_may_have(serve: Serve, stack: ExitStack) -> None:
    server = serve(create_app(Greeter, Action, Observation, max_concurrent_envs=2, access=POLICY))
    first, second = (stack.enter_context(dial(server, AGENT)) for _ in range(2))
    session = ask(first, type="open", id=1)["session"]
    second.send(json.dumps({"type": "open", "id": 1, "wait_s": 30}))
    server.wait_for(lambda: len(server.manager.slots.queue) == 1 and not server.manager.slots.queue.has_next)
    peer = stack.enter_context(dial(server, {"Authorization": "Bearer trainer-token"}))
    assert ask(peer, type="open", id=1)["type"] == "opened"  # it passes the agent that waits
    first.send(json.dumps({"type": "close", "id": 2, "session": session}))
    replies = iter(lambda: json.loads(second.recv(timeout=10)), None)
    assert next(reply for reply in replies if reply["type"] != "event")["type"] == "opened"


def test_agents_without_a_slot_of_their_own_still_reach_a_session_that_was_prepared(serve: Serve) -> None:
    app = create_app(Greeter, Action, Observation, max_concurrent_envs=2, max_agent_sessions=0, access=POLICY)
    server = serve(app)
    trainer = {"Authorization": "Bearer trainer-token", "X-OpenEnv-Session": "new"}
    opened = http_calls.post(f"{server.url}/reset", headers=trainer, trust_env=False)
    call = {"name": "greet", "session_id": opened.headers["X-OpenEnv-Session"]}
    reply = _post(server, {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    assert "hello" in json.dumps(reply)
    refused = _post(server, {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"})
    assert refused["error"]["data"]["max_sessions"] == 2


def test_an_agent_that_waits_does_not_stand_in_the_orchestrators_way(serve: Serve, stack: ExitStack) -> None:
    app = create_app(Greeter, Action, Observation, max_concurrent_envs=2, max_agent_sessions=1, access=POLICY)
    server = serve(app)
    first = stack.enter_context(dial(server, AGENT))
    ask(first, type="open", id=1)
    waiting = stack.enter_context(dial(server, AGENT))
    refused = ask(waiting, type="open", id=1, wait_s=30)  # it would wait for its own kind
    assert refused["data"]["code"] == "CAPACITY_REACHED"
    trainer = {"Authorization": "Bearer trainer-token"}
    peer = stack.enter_context(dial(server, trainer))
    assert ask(peer, type="open", id=1)["type"] == "opened"
