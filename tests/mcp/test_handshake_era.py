"""Standard MCP with a handshake, 2024-11-05 to 2025-11-25: statuses, sessions, streams, every method, on the wire."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from openenv.server.mcp import reply

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
LEVELS = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]


def in_background(function: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a request elsewhere; what is returned waits for its answer."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(function()), daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(20)
        assert outcome, "the request was not answered"
        return outcome[0]

    return wait


# -- initialize ---------------------------------------------------------------------------------------------------


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


# -- which POST is for whom ---------------------------------------------------------------------------------------


def test_a_request_without_session_is_refused(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).post(PING, {"accept": "application/json, text/event-stream"})
    assert (answer.status, answer.error["code"], answer.message["id"]) == (400, -32600, 1)


def test_a_request_of_an_unknown_session_is_not_found(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).post(PING, {"mcp-session-id": "nobody"})
    assert (answer.status, answer.error["code"], answer.message["id"]) == (404, -32600, 1)


@pytest.mark.parametrize("accept", ["application/json, text/event-stream", "application/json", "*/*"])
def test_a_session_answers_whatever_is_accepted(server: Any, handshake: Any, accept: str) -> None:
    answer = handshake(server.url).request("ping", headers={"accept": accept})
    assert (answer.status, answer.result) == (200, {})


def test_the_version_header_may_be_missing_or_an_older_one(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    assert client.post(PING, {"mcp-session-id": client.session_id}).result == {}
    assert client.request("ping", headers={"mcp-protocol-version": "2025-03-26"}).result == {}


def test_a_version_header_that_nobody_knows_is_refused(server: Any, handshake: Any) -> None:
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
    response = httpx2.request(method, f"{server.url}/mcp", trust_env=False)
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


# -- the stream of GET, and the end -------------------------------------------------------------------------------


def test_get_opens_a_stream_that_lives_as_long_as_the_session(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    with client.http.stream("GET", "/mcp", headers=client.headers) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["mcp-session-id"] == client.session_id
        chunks = stream.iter_raw()
        assert next(chunks).startswith(b":")
        assert client.http.delete("/mcp", headers=client.headers).status_code == 200
        assert all(chunk.startswith(b":") for chunk in chunks)


def test_a_second_stream_is_refused_while_the_first_is_open(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    with client.http.stream("GET", "/mcp", headers=client.headers) as first:
        signs_of_life = first.iter_raw()  # kept: the stream is closed with its iterator
        assert next(signs_of_life).startswith(b":")
        second = client.http.get("/mcp", headers=client.headers)
        assert second.status_code == 409
        assert second.json()["error"]["code"] == -32600

    def opens() -> bool:
        with client.http.stream("GET", "/mcp", headers=client.headers) as again:
            return again.status_code == 200

    server.wait_for(opens)


def test_get_needs_a_session_and_a_client_that_reads_events(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    events = {"accept": "text/event-stream"}
    assert client.http.get("/mcp", headers=events).status_code == 405
    assert client.http.get("/mcp", headers={**client.headers, "accept": "application/json"}).status_code == 405
    assert client.http.get("/mcp", headers={**events, "mcp-session-id": "nobody"}).status_code == 404


def test_an_open_stream_keeps_the_session_beyond_its_lease(desk: Any, handshake: Any) -> None:
    server = desk(lease_s=0.3)
    client = handshake(server.url)
    with client.http.stream("GET", "/mcp", headers=client.headers) as stream:
        pings = sum(1 for _, chunk in zip(range(12), stream.iter_raw(), strict=False) if chunk)
        assert pings == 12, "twelve signs of life come within more than three leases"
        assert server.session.id == client.session_id
    server.wait_for(lambda: server.manager.active == 0)


def test_delete_ends_the_session_and_frees_its_slot(desk: Any, handshake: Any) -> None:
    server = desk(sessions=1)
    client = handshake(server.url)
    response = client.http.delete("/mcp", headers=client.headers)
    assert (response.status_code, response.content) == (200, b"")
    server.wait_for(lambda: server.manager.active == 0 and server.watch.alive == 0)
    for answer in (client.request("ping"), client.call("count"), client.notify("notifications/initialized")):
        assert (answer.status, answer.error["code"]) == (404, -32600)
    assert client.http.get("/mcp", headers=client.headers).status_code == 404
    assert client.http.delete("/mcp", headers=client.headers).status_code == 404
    assert handshake(server.url).call("count").result["structuredContent"] == {"result": 1}


def test_delete_without_a_session_is_refused(server: Any, uninitialized: Any) -> None:
    client = uninitialized(server.url)
    assert client.http.delete("/mcp").status_code == 400
    assert client.http.delete("/mcp", headers={"mcp-session-id": "nobody"}).status_code == 404


def test_delete_cancels_what_runs(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    answered = in_background(lambda: client.call("wait"))
    assert server.watch.entered.wait(10)
    client.http.delete("/mcp", headers=client.headers)
    assert answered().error["code"] == -32800
    server.wait_for(lambda: server.watch.alive == 0)


def test_a_session_that_nobody_uses_ends_with_its_lease(desk: Any, handshake: Any) -> None:
    server = desk(sessions=1, lease_s=0.2)
    client = handshake(server.url)
    server.wait_for(lambda: server.manager.active == 0)
    answer = client.call("count")
    assert answer.status == 404
    assert "expired" in answer.error["message"]
    assert handshake(server.url).call("count").result["structuredContent"] == {"result": 1}


# -- tools --------------------------------------------------------------------------------------------------------


def test_tools_are_listed_in_camel_case_without_nulls(server: Any, handshake: Any) -> None:
    tools = {tool["name"]: tool for tool in handshake(server.url).request("tools/list").result["tools"]}
    assert set(tools) >= {"echo", "count", "work", "talk", "boom", "thing", "big", "wait", "spin"}
    echo = tools["echo"]
    assert echo["description"] == "Say it again."
    assert echo["inputSchema"]["properties"]["times"]["default"] == 1
    assert echo["outputSchema"]["type"] == "object"
    assert None not in echo.values()


def test_tools_of_the_other_mode_are_neither_listed_nor_called(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    names = [tool["name"] for tool in client.request("tools/list").result["tools"]]
    assert "peek" in names
    assert "ship" not in names
    assert client.call("peek").result["structuredContent"] == {"result": 0}
    assert client.call("ship").error["code"] == -32602


def test_a_long_list_comes_in_pages(desk: Any, handshake: Any) -> None:
    client = handshake(desk(extra_tools=220).url)
    names: list[str] = []
    pages = 0
    params: dict[str, Any] = {}
    while True:
        result = client.request("tools/list", params).result
        pages += 1
        names += [tool["name"] for tool in result["tools"]]
        assert len(result["tools"]) <= 100
        if "nextCursor" not in result:
            break
        params = {"cursor": result["nextCursor"]}
    assert pages == 3
    assert len(names) == len(set(names)) == 220 + 12
    assert names[-1] != names[0]


@pytest.mark.parametrize("cursor", ["nonsense", "", 7, "OTk5OTk=", "LTE=", {"a": 1}])
def test_an_invalid_cursor_is_refused(server: Any, handshake: Any, cursor: Any) -> None:
    assert handshake(server.url).request("tools/list", {"cursor": cursor}).error["code"] == -32602


def test_a_result_has_content_and_structure(server: Any, handshake: Any) -> None:
    answer = handshake(server.url).call("echo", {"message": "ab", "times": 2})
    assert (answer.status, answer.is_stream) == (200, False)
    assert answer.result["isError"] is False
    assert answer.result["structuredContent"] == {"message": "abab"}
    assert json.loads(answer.text) == {"message": "abab"}
    assert answer.result.keys() <= {"content", "structuredContent", "isError", "_meta"}


def test_state_stays_within_a_session_and_is_not_shared(server: Any, handshake: Any) -> None:
    one, other = handshake(server.url), handshake(server.url)
    assert [one.call("count").result["structuredContent"]["result"] for _ in range(3)] == [1, 2, 3]
    assert other.call("count").result["structuredContent"] == {"result": 1}
    assert server.manager.active == 2


@pytest.mark.parametrize(
    "params", [{}, {"name": 7}, {"name": ""}, {"name": "echo", "arguments": [1]}, {"name": "no such tool"}]
)
def test_a_call_that_is_wrong_as_a_request_is_a_json_rpc_error(server: Any, handshake: Any, params: Any) -> None:
    answer = handshake(server.url).request("tools/call", params)
    assert (answer.status, answer.error["code"]) == (200, -32602)


def test_calls_of_one_session_take_turns_and_lists_do_not_wait(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    waiting = in_background(lambda: client.call("wait", id="long"))
    assert server.watch.entered.wait(10)
    assert client.request("tools/list").result["tools"]
    assert client.request("ping").result == {}
    counted = in_background(lambda: client.call("count"))
    client.notify("notifications/cancelled", {"requestId": "long"})
    assert waiting().error["code"] == -32800
    assert counted().result["structuredContent"] == {"result": 1}


# -- progress, logging, cancellation ------------------------------------------------------------------------------


def test_progress_comes_as_events_before_the_result(server: Any, handshake: Any) -> None:
    answer = handshake(server.url).call("work", {"steps": 3}, progressToken="token")
    assert answer.is_stream
    assert answer.headers["cache-control"].startswith("no-cache")
    notes = answer.notes("notifications/progress")
    assert notes == [
        {"progressToken": "token", "progress": step, "total": 3, "message": f"step {step}"} for step in (1, 2, 3)
    ]
    assert answer.text == "worked"


def test_no_progress_is_sent_to_a_client_that_asked_for_none(server: Any, handshake: Any) -> None:
    answer = handshake(server.url).call("work")
    assert not answer.is_stream
    assert answer.text == "worked"


def test_a_progress_token_alone_makes_no_stream(server: Any, handshake: Any) -> None:
    assert not handshake(server.url).call("count", progressToken=0).is_stream


def test_a_long_silence_is_broken_by_signs_of_life(
    server: Any, handshake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "PING_S", 0.05)
    client = handshake(server.url)
    body = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "wait_briefly"}}
    response = client.http.post("/mcp", json=body, headers=client.headers)
    assert response.headers["content-type"] == "text/event-stream"
    assert ": ping" in response.text.splitlines()
    (data,) = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(data.removeprefix("data: "))["result"]["isError"] is True


def test_log_messages_come_from_the_level_that_the_client_sets(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    heard = {}
    for level in ("debug", "info", "warning", "emergency"):
        assert client.request("logging/setLevel", {"level": level}).result == {}
        heard[level] = [note["level"] for note in client.call("talk").notes("notifications/message")]
    assert heard == {
        "debug": ["debug", "info", "error"],
        "info": ["info", "error"],
        "warning": ["error"],
        "emergency": [],
    }


def test_every_level_can_be_set_and_no_other(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    assert all(client.request("logging/setLevel", {"level": level}).result == {} for level in LEVELS)
    for level in ("loud", 7, None):
        assert client.request("logging/setLevel", {"level": level}).error["code"] == -32602


@pytest.mark.parametrize("tool", ["wait", "spin"])
def test_a_cancelled_call_is_answered_and_stops(server: Any, handshake: Any, tool: str) -> None:
    client = handshake(server.url)
    answered = in_background(lambda: client.call(tool, id="mine"))
    assert server.watch.entered.wait(10)
    client.notify("notifications/cancelled", {"requestId": "other", "reason": "a mistake"})
    assert client.notify("notifications/cancelled", {"requestId": "mine", "reason": "enough"}).status == 202
    answer = answered()
    assert (answer.status, answer.error["code"]) == (200, -32800)
    assert server.watch.cancelled.wait(10)
    assert client.call("count").result["structuredContent"] == {"result": 1}


def test_a_client_cannot_cancel_a_request_of_another(server: Any, handshake: Any) -> None:
    one, other = handshake(server.url), handshake(server.url)
    answered = in_background(lambda: one.call("wait", id=77))
    assert server.watch.entered.wait(10)
    other.notify("notifications/cancelled", {"requestId": 77})
    assert other.request("ping").result == {}
    assert not server.watch.cancelled.is_set()
    one.notify("notifications/cancelled", {"requestId": 77})
    assert answered().error["code"] == -32800


def test_hanging_up_does_not_cancel_a_call(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    body = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {"name": "wait"}}
    with pytest.raises(httpx2.ReadTimeout):
        client.http.post("/mcp", json=body, headers=client.headers, timeout=0.5)
    assert server.watch.entered.is_set()
    assert not server.watch.cancelled.is_set()
    client.notify("notifications/cancelled", {"requestId": 5})
    assert server.watch.cancelled.wait(10)


# -- resources, prompts, completions ------------------------------------------------------------------------------


def test_resources_are_passed_through(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    assert [found["uri"] for found in client.request("resources/list").result["resources"]] == ["note://today"]
    templates = client.request("resources/templates/list").result["resourceTemplates"]
    assert [found["uriTemplate"] for found in templates] == ["note://{day}/text"]
    (content,) = client.request("resources/read", {"uri": "note://today"}).result["contents"]
    assert (content["uri"], content["text"]) == ("note://today", "hello")
    (content,) = client.request("resources/read", {"uri": "note://monday/text"}).result["contents"]
    assert content["text"] == "note of monday"


def test_a_resource_that_is_not_there_is_an_error(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    error = client.request("resources/read", {"uri": "note://nowhere"}).error
    assert (error["code"], error["data"]) == (-32002, {"uri": "note://nowhere"})
    assert client.request("resources/read", {}).error["code"] == -32602


def test_prompts_are_passed_through(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    (prompt,) = client.request("prompts/list").result["prompts"]
    assert (prompt["name"], prompt["description"]) == ("greet", "Greet somebody.")
    (message,) = client.request("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}).result["messages"]
    assert (message["role"], message["content"]["text"]) == ("user", "Hello Ada")
    for params in ({}, {"name": "nobody"}):
        assert client.request("prompts/get", params).error["code"] == -32602
    assert client.request("prompts/get", {"name": "greet"}).error["code"] in (-32602, -32603)


def test_a_server_without_completions_has_none_to_offer(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    params = {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "name", "value": "A"}}
    assert client.request("completion/complete", params).result["completion"]["values"] == []
    for bad in ({}, {"ref": {"type": "ref/other"}, "argument": {}}, {"ref": 1, "argument": 2}):
        assert client.request("completion/complete", bad).error["code"] == -32602


# -- attaching ----------------------------------------------------------------------------------------------------


def prepared(url: str, seed: int) -> str:
    """Open a session as an orchestrator does, at a number."""
    response = httpx2.post(f"{url}/reset", json={"seed": seed}, headers={"x-openenv-session": "new"}, trust_env=False)
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
    state = httpx2.get(f"{server.url}/state", headers={"x-openenv-session": name}, trust_env=False).json()
    assert state["step_count"] == 1
    assert client.http.delete("/mcp", headers=client.headers).status_code == 200
    assert client.request("ping").status == 404
    assert server.session.id == name, "the session is the orchestrator's and goes on"


def test_attaching_to_no_session_is_refused(server: Any, uninitialized: Any) -> None:
    answer = uninitialized(server.url).initialize(headers={"X-OpenEnv-Session": "nobody"})
    assert answer.status == 200
    assert answer.error["data"]["code"] == "SESSION_NOT_FOUND"
    assert server.manager.active == 0


def test_an_attached_client_is_told_when_the_session_has_ended(server: Any, uninitialized: Any) -> None:
    name = prepared(server.url, 1)
    client = uninitialized(server.url)
    client.initialize(headers={"X-OpenEnv-Session": name})
    httpx2.delete(f"{server.url}/sessions/{name}", trust_env=False)
    answer = client.call("count")
    assert answer.status == 404
    assert "closed by the client" in answer.error["message"]
