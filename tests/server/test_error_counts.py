"""Whatever a server refuses or fails at is counted once in `/metrics`, under a code, on every surface."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.sync.client import connect

import http_calls
from environments import Idle
from openenv import Action, Observation, create_app
from openenv.server.access import AccessPolicy
from servers import RunningServer, Serve

LIMIT = 20_000
BIG = "x" * (LIMIT + 10)
MCP = {"Accept": "application/json, text/event-stream", "Mcp-Protocol-Version": "2025-06-18"}
POLICY = AccessPolicy(orchestrator="trainer-token", agent="agent-token", observer="observer-token")


class Fragile(Idle):
    """Fails on request."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        if seed == 13:
            raise ValueError("unlucky")
        return Observation()


def http(method: str, path: str, **options: Any) -> Callable[[Any], object]:
    """Send one HTTP request."""
    headers = {"Authorization": "Bearer trainer-token", **options.pop("headers", {})}

    def send(server: Any) -> object:
        return http_calls.request(method, server.url + path, headers=headers, trust_env=False, **options)

    return send


def rpc(message: Any, headers: dict[str, str] | None = None) -> Callable[[Any], object]:
    return http(
        "POST", "/mcp", content=message if isinstance(message, str) else json.dumps(message), headers=headers or {}
    )


def ws(path: str, *messages: Any, subprotocol: str | None = None) -> Callable[[Any], object]:
    """Send messages over a WebSocket, each after the reply to the one before."""

    def send(server: Any) -> None:
        offered: Any = {} if subprotocol is None else {"subprotocols": [subprotocol]}
        headers = {"Authorization": "Bearer trainer-token"}
        with connect(f"ws://127.0.0.1:{server.port}{path}", additional_headers=headers, proxy=None, **offered) as peer:
            for message in messages:
                peer.send(message if isinstance(message, str) else json.dumps(message))
                peer.recv(timeout=20)

    return send


V2 = "openenv.v2.json"
NEW = {"X-OpenEnv-Session": "new"}
CASES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no token": (http("GET", "/schema", headers={"Authorization": ""}), "UNAUTHORIZED"),
    "another role": (http("POST", "/reset", headers={"Authorization": "Bearer agent-token"}), "FORBIDDEN"),
    "another role's tools": (rpc({}, {"Authorization": "Bearer observer-token"}), "FORBIDDEN"),
    "a foreign page": (http("POST", "/reset", headers={"Origin": "http://evil.example"}), "FOREIGN_ORIGIN"),
    "a reset that is too long": (http("POST", "/reset", json={"text": BIG}), "BODY_TOO_LARGE"),
    "a step that is too long": (http("POST", "/step", json={"action": {"text": BIG}}), "BODY_TOO_LARGE"),
    "a session requested at length": (http("POST", "/sessions", json={"key": BIG}), "BODY_TOO_LARGE"),
    "a call that is too long": (rpc({"jsonrpc": "2.0", "method": BIG}), "BODY_TOO_LARGE"),
    "a step without a body": (http("POST", "/step"), "VALIDATION_ERROR"),
    "a step that is no step": (http("POST", "/step", json={"action": 3}), "VALIDATION_ERROR"),
    "a session requested wrongly": (http("POST", "/sessions", json={"wait_s": -1}), "VALIDATION_ERROR"),
    "a key that is short": (http("POST", "/sessions", headers={"Idempotency-Key": "1"}), "VALIDATION_ERROR"),
    "a first reset with a short key": (
        http("POST", "/reset", headers={**NEW, "Idempotency-Key": "1"}),
        "VALIDATION_ERROR",
    ),
    "a step in no session": (http("POST", "/step", json={"action": {}}, headers=NEW), "SESSION_NOT_FOUND"),
    "an unknown session": (http("GET", "/state", headers={"X-OpenEnv-Session": "none"}), "SESSION_NOT_FOUND"),
    "a first reset that fails": (http("POST", "/reset", json={"seed": 13}, headers=NEW), "EXECUTION_ERROR"),
    "JSON-RPC that is no JSON": (rpc("{"), "PARSE_ERROR"),
    "JSON-RPC that is no object": (rpc([1]), "PARSE_ERROR"),
    "JSON-RPC that is no request": (rpc({"jsonrpc": "1.0"}), "INVALID_REQUEST"),
    "an unknown method": (rpc({"jsonrpc": "2.0", "id": 1, "method": "fly"}), "METHOD_NOT_FOUND"),
    "a call without a name": (rpc({"jsonrpc": "2.0", "id": 1, "method": "tools/call"}), "INVALID_PARAMS"),
    "a call in no session": (
        rpc({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"session_id": "none"}}),
        "SESSION_NOT_FOUND",
    ),
    "MCP that is no JSON": (rpc("{", MCP), "PARSE_ERROR"),
    "MCP without a session": (rpc({"jsonrpc": "2.0", "id": 1, "method": "ping"}, MCP), "INVALID_REQUEST"),
    "MCP in no session": (
        rpc({"jsonrpc": "2.0", "id": 1, "method": "ping"}, {**MCP, "Mcp-Session-Id": "none"}),
        "SESSION_NOT_FOUND",
    ),
    "v1 that is no JSON": (ws("/ws", "{"), "INVALID_JSON"),
    "v1 of no type": (ws("/ws", {"type": "fly"}), "UNKNOWN_TYPE"),
    "v1 that is too long": (ws("/ws", {"type": "reset", "data": {"text": BIG}}), "VALIDATION_ERROR"),
    "v1 with an unknown call": (
        ws("/ws", {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "fly"}}),
        "METHOD_NOT_FOUND",
    ),
    "a socket for calls, no JSON": (ws("/mcp", "{"), "PARSE_ERROR"),
    "v2 that is no JSON": (ws("/ws", "{", subprotocol=V2), "INVALID_JSON"),
    "v2 of no type": (ws("/ws", {"type": "fly", "id": 1}, subprotocol=V2), "UNKNOWN_TYPE"),
    "v2 in no session": (ws("/ws", {"type": "state", "id": 1}, subprotocol=V2), "SESSION_NOT_FOUND"),
    "v2 that is too long": (ws("/ws", {"type": "ping", "id": 1, "x": BIG}, subprotocol=V2), "VALIDATION_ERROR"),
    "v2 with a nonce that is short": (
        ws("/ws", {"type": "open", "id": 1, "nonce": "1"}, subprotocol=V2),
        "VALIDATION_ERROR",
    ),
    "v2 with a wrong token": (ws("/ws", {"type": "open", "id": 1, "resume": "a.b.c"}, subprotocol=V2), "SESSION_LOST"),
    "v2 with an old id": (
        ws("/ws", {"type": "open", "id": 1}, {"type": "state", "id": 5}, {"type": "state", "id": 4}, subprotocol=V2),
        "STALE_REQUEST",
    ),
}


def counted(server: Any) -> dict[str, float]:
    """Return the errors that were counted, by code."""
    headers = {"Authorization": "Bearer trainer-token"}
    text = http_calls.get(f"{server.url}/metrics", headers=headers, trust_env=False).text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {one.labels["code"]: one.value for one in samples if one.name == "openenv_errors_total" and one.value}


@pytest.fixture(scope="module")
def server(serve_once: Serve) -> RunningServer:
    """A server that asks for tokens and takes no long requests."""
    return serve_once(
        create_app(
            Fragile,
            Action,
            Observation,
            max_concurrent_envs=8,
            access=POLICY,
            max_message_bytes=LIMIT,
            session_grace_s=0,
        )
    )


@pytest.mark.parametrize("case", CASES)
def test_each_refusal_is_counted_once_under_its_code(server: RunningServer, case: str) -> None:
    act, code = CASES[case]
    before = counted(server)
    act(server)
    after = counted(server)
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)} == {code: 1}
