"""MCP with a handshake: `initialize`, which requests are taken, and sessions that others have prepared."""

from __future__ import annotations

from typing import Any

import pytest

import http_calls

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


# -- initialize -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_a_version_with_a_handshake_is_spoken_as_asked(server: Any, uninitialized: Any, version: str) -> None:
    assert uninitialized(server.url).initialize(version).result["protocolVersion"] == version


@pytest.mark.parametrize("version", ["2026-07-28", "1999-01-01", "latest"])
def test_another_version_is_answered_with_the_newest_that_has_one(
    server: Any, uninitialized: Any, version: str
) -> None:
    assert uninitialized(server.url).initialize(version).result["protocolVersion"] == "2025-11-25"


def test_initialize_names_the_server_its_abilities_and_the_session(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).initialize()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["mcp-session-id"].isascii()
    assert answer.headers["mcp-session-id"].isprintable()
    result = answer.result
    assert result["serverInfo"]["name"] == "desk"
    assert isinstance(result["serverInfo"]["version"], str)
    assert result["instructions"] == "Count."
    assert result["capabilities"] == {
        "tools": {"listChanged": False},
        "resources": {"subscribe": False, "listChanged": False},
        "prompts": {"listChanged": False},
        "completions": {},
        "logging": {},
    }


def test_initialize_without_a_version_is_refused_and_opens_nothing(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).initialize(protocolVersion=None)
    assert (answer.status, answer.error["code"]) == (200, -32602)
    assert "mcp-session-id" not in answer.headers
    assert server.manager.active == 0


def test_a_session_begins_with_a_reset(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    assert server.watch.resets == 1
    assert server.session.id == client.session_id


def test_a_second_initialize_keeps_the_session(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    client.call("count")
    answer = client.request("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}})
    assert answer.result["protocolVersion"] == "2025-11-25"
    assert answer.headers["mcp-session-id"] == client.session_id
    assert client.call("count").result["structuredContent"] == {"result": 2}
    assert server.watch.resets == 1


def test_initialize_without_a_free_slot_is_an_error_with_status_200(
    desk: Any, handshake: Any, uninitialized: Any
) -> None:
    server = desk(sessions=1)
    first = handshake(server.url)
    answer = uninitialized(server.url).initialize()
    assert answer.status == 200, "older clients lose what comes with another status"
    assert "mcp-session-id" not in answer.headers
    assert answer.error["code"] == -32000
    assert answer.error["data"]["active_sessions"] == 1
    assert answer.error["data"]["max_sessions"] == 1
    assert first.call("count").result["isError"] is False


# -- which POST is for whom -------------------------------------------------------------------------------------------


def test_a_request_without_session_is_refused(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).post(PING, {"accept": "application/json, text/event-stream"})
    assert (answer.status, answer.error["code"], answer.message["id"]) == (400, -32600, 1)


def test_a_request_of_an_unknown_session_is_not_found(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).post(PING, {"mcp-session-id": "nobody"})
    assert (answer.status, answer.error["code"], answer.message["id"]) == (404, -32600, 1)


@pytest.mark.parametrize("accept", ["application/json, text/event-stream", "application/json", "*/*"])
def test_a_session_answers_any_accept_header(server: Any, handshake: Any, accept: str) -> None:
    answer = handshake(server.url).request("ping", headers={"accept": accept})
    assert (answer.status, answer.result) == (200, {})


def test_the_version_header_may_be_missing_or_an_older_one(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    assert client.post(PING, {"mcp-session-id": client.session_id}).result == {}
    assert client.request("ping", headers={"mcp-protocol-version": "2025-03-26"}).result == {}


def test_an_unknown_version_header_is_refused(server: Any, handshake: Any) -> None:
    answer = handshake(server.url).request("ping", headers={"mcp-protocol-version": "1999-01-01"})
    assert answer.status == 400
    assert answer.error["code"] in (-32602, -32022)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{nope", -32700),
        (b"\xff\xfe", -32700),
        (b"", -32700),
        ([PING], -32600),
        ([], -32600),
        (42, -32600),
        ({"id": 1, "method": "ping"}, -32600),
        ({"jsonrpc": "2.0", "id": 1}, -32600),
        ({"jsonrpc": "2.0", "id": 1, "method": 7}, -32600),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, -32600),
        ({"jsonrpc": "2.0", "id": 1.5, "method": "ping"}, -32600),
        ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, -32602),
    ],
)
def test_what_is_no_single_request_is_refused_and_the_session_lives(
    server: Any, handshake: Any, body: Any, code: int
) -> None:
    client = handshake(server.url)
    answer = client.post(body, client.headers)
    assert (answer.status, answer.error["code"]) == (400, code)
    assert client.request("ping").result == {}


@pytest.mark.parametrize(
    "body",
    [
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"},
        {"jsonrpc": "2.0", "method": "notifications/whatever", "params": {"a": 1}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 12345}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": {"a": 1}}},
        {"jsonrpc": "2.0", "id": 99, "result": {}},
        {"jsonrpc": "2.0", "id": 99, "error": {"code": 1, "message": "no"}},
    ],
)
def test_notifications_and_responses_are_accepted_without_a_body(server: Any, handshake: Any, body: Any) -> None:
    client = handshake(server.url)
    answer = client.post(body, client.headers)
    assert (answer.status, answer.messages) == (202, [])
    assert answer.headers["mcp-session-id"] == client.session_id


def test_ids_come_back_as_they_were(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    for request_id in ("abc", "", 0, -7, 2**53):
        assert client.request("ping", id=request_id).message["id"] == request_id


def test_an_unknown_method_is_a_json_rpc_error(server: Any, handshake: Any) -> None:
    answer = handshake(server.url).request("resources/subscribe", {"uri": "note://today"})
    assert (answer.status, answer.error["code"]) == (200, -32601)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "HEAD"])
def test_other_http_methods_are_not_allowed(server: Any, method: str) -> None:
    response = http_calls.request(method, f"{server.url}/mcp", trust_env=False)
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, POST, DELETE"


def test_pages_of_other_sites_are_refused(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).initialize(headers={"origin": "http://evil.example"})
    assert answer.status == 403
    assert server.manager.active == 0


def test_requests_before_the_client_is_ready_are_served(server: Any, uninitialized: Any) -> None:
    client = uninitialized(server.url)
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}}
    client.session_id = client.post(body).headers["mcp-session-id"]
    assert client.call("count").result["structuredContent"] == {"result": 1}


# -- attaching --------------------------------------------------------------------------------------------------------


def prepared(url: str, seed: int) -> str:
    """Open a session as an orchestrator does, at a number."""
    response = http_calls.post(
        f"{url}/reset", json={"seed": seed}, headers={"x-openenv-session": "new"}, trust_env=False
    )
    assert response.status_code == 200
    session_id: str = response.headers["x-openenv-session"]
    return session_id


@pytest.mark.parametrize("where", ["header", "query", "meta"])
def test_a_client_plays_the_episode_that_an_orchestrator_has_prepared(
    server: Any, uninitialized: Any, where: str
) -> None:
    name = prepared(server.url, 40)
    client = uninitialized(server.url)
    client.initialize(
        headers={"X-OpenEnv-Session": name} if where == "header" else None,
        path=f"/mcp?session_id={name}" if where == "query" else "/mcp",
        **({"_meta": {"openenv/session": name}} if where == "meta" else {}),
    )
    assert client.session_id not in (None, name)
    assert server.watch.resets == 1, "the orchestrator's reset is the only one"
    assert client.call("count").result["structuredContent"] == {"result": 41}
    state = http_calls.get(f"{server.url}/state", headers={"x-openenv-session": name}, trust_env=False).json()
    assert state["step_count"] == 1
    assert client.http.delete("/mcp", headers=client.headers).status_code == 200
    assert client.request("ping").status == 404
    assert server.session.id == name, "the session is the orchestrator's and goes on"


def test_attaching_to_no_session_is_refused(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).initialize(headers={"X-OpenEnv-Session": "nobody"})
    assert answer.status == 200
    assert answer.error["data"]["code"] == "SESSION_NOT_FOUND"
    assert server.manager.active == 0


def test_an_attached_client_learns_that_the_session_has_ended(server: Any, uninitialized: Any) -> None:
    name = prepared(server.url, 1)
    client = uninitialized(server.url)
    client.initialize(headers={"X-OpenEnv-Session": name})
    http_calls.delete(f"{server.url}/sessions/{name}", trust_env=False)
    answer = client.call("count")
    assert answer.status == 404
    assert "(closed)" in answer.error["message"]
