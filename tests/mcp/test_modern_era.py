"""Standard MCP since 2026-07-28, where each request stands alone: what it must carry, and how state is kept all the
same, by a cookie or an explicit handle."""

from __future__ import annotations

import base64
import threading
from typing import Any

import httpx2
import pytest

import http_calls

VERSION = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
SERVER_INFO = "io.modelcontextprotocol/serverInfo"
LOG_LEVEL = "io.modelcontextprotocol/logLevel"
COOKIE = "openenv_mcp"


# -- server/discover, and what every result has -------------------------------------------------------------------


def test_discover_tells_versions_and_abilities_and_opens_nothing(server: Any, modern: Any) -> None:
    answer = modern(server.url).request("server/discover")
    assert answer.status == 200
    result = answer.result
    assert result["resultType"] == "complete"
    assert result["supportedVersions"][0] == "2026-07-28"
    assert set(result["supportedVersions"]) >= {"2025-11-25", "2024-11-05"}
    assert result["capabilities"]["tools"] == {"listChanged": False}
    assert (result["ttlMs"], result["cacheScope"]) == (0, "private")
    assert result["_meta"][SERVER_INFO]["name"] == "desk"
    assert "set-cookie" not in answer.headers
    assert server.manager.active == 0


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("tools/list", {}),
        ("resources/list", {}),
        ("resources/templates/list", {}),
        ("resources/read", {"uri": "note://today"}),
        ("prompts/list", {}),
        ("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}),
        ("tools/call", {"name": "count", "arguments": {}}),
        (
            "completion/complete",
            {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "name", "value": "A"}},
        ),
    ],
)
def test_every_result_is_marked_as_complete(server: Any, modern: Any, method: str, params: Any) -> None:
    answer = modern(server.url).request(method, params)
    assert (answer.status, answer.result["resultType"]) == (200, "complete")
    assert answer.result["_meta"][SERVER_INFO]["name"] == "desk"
    is_cached = method.endswith("/list") or method == "resources/read"
    assert (answer.result.get("ttlMs"), answer.result.get("cacheScope")) == (
        (0, "private") if is_cached else (None, None)
    )
    assert "mcp-session-id" not in answer.headers


@pytest.mark.parametrize("method", ["tools/list", "resources/list", "resources/templates/list", "prompts/list"])
def test_lists_need_no_session(desk: Any, modern: Any, method: str) -> None:
    server = desk(sessions=1)
    assert modern(server.url).request(method).status == 200
    assert server.manager.active == 0
    server.wait_for(lambda: server.watch.alive == 0)


def test_a_long_list_comes_in_pages(desk: Any, modern: Any) -> None:
    client = modern(desk(extra_tools=150).url)
    first = client.request("tools/list").result
    second = client.request("tools/list", {"cursor": first["nextCursor"]}).result
    assert (len(first["tools"]), len(second["tools"])) == (100, 62)
    assert "nextCursor" not in second
    answer = client.request("tools/list", {"cursor": "nonsense"})
    assert (answer.status, answer.error["code"]) == (400, -32602)


# -- what a request must carry ------------------------------------------------------------------------------------


def refused(answer: Any, status: int, code: int) -> bool:
    """Whether an answer is this refusal, of the request that was sent."""
    return (answer.status, answer.error["code"]) == (status, code)


@pytest.mark.parametrize("missing", [VERSION, CAPABILITIES])
def test_a_request_without_its_meta_is_refused(server: Any, modern: Any, missing: str) -> None:
    client = modern(server.url)
    body, headers = client.prepare("tools/list")
    del body["params"]["_meta"][missing]
    answer = client.post(body, headers)
    assert refused(answer, 400, -32602)
    assert answer.message["id"] == body["id"]


def test_capabilities_must_be_an_object(server: Any, modern: Any) -> None:
    assert refused(modern(server.url).request("tools/list", meta={CAPABILITIES: []}), 400, -32602)


@pytest.mark.parametrize("name", ["mcp-method", "mcp-name", "mcp-protocol-version"])
def test_a_missing_header_is_a_mismatch(server: Any, modern: Any, name: str) -> None:
    client = modern(server.url)
    body, headers = client.prepare("tools/call", {"name": "count"})
    del headers[name]
    answer = client.post(body, headers)
    assert refused(answer, 400, -32020)
    assert answer.message["id"] == body["id"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("mcp-method", "tools/list"), ("mcp-name", "echo"), ("mcp-name", "COUNT"), ("mcp-protocol-version", "2027-01-01")],
)
def test_a_header_that_differs_from_the_body_is_refused(server: Any, modern: Any, name: str, value: str) -> None:
    answer = modern(server.url).call("count", headers={name: value})
    assert refused(answer, 400, -32020)
    assert server.manager.active == 0


def test_a_header_may_be_base64(server: Any, modern: Any) -> None:
    answer = modern(server.url).call("count", headers={"mcp-name": "=?base64?Y291bnQ=?="})
    assert answer.result["structuredContent"] == {"result": 1}


def test_a_name_that_is_no_plain_text_comes_as_base64(server: Any, modern: Any) -> None:
    name = "zähle"
    header = f"=?base64?{base64.b64encode(name.encode()).decode()}?="
    answer = modern(server.url).call(name, headers={"mcp-name": header})
    assert refused(answer, 400, -32602)
    assert name in answer.error["message"]


@pytest.mark.parametrize("value", ["=?base64?###?=", "=?base64?/w==?="])
def test_a_header_with_broken_base64_is_refused(server: Any, modern: Any, value: str) -> None:
    assert refused(modern(server.url).call("count", headers={"mcp-name": value}), 400, -32020)


def test_an_unknown_version_is_answered_with_those_that_are_known(server: Any, modern: Any) -> None:
    answer = modern(server.url).request(
        "server/discover", meta={VERSION: "2099-01-01"}, headers={"mcp-protocol-version": "2099-01-01"}
    )
    assert refused(answer, 400, -32022)
    assert answer.error["data"]["requested"] == "2099-01-01"
    assert "2026-07-28" in answer.error["data"]["supported"]


@pytest.mark.parametrize(
    "method", ["initialize", "ping", "logging/setLevel", "resources/subscribe", "subscriptions/listen", "no/such"]
)
def test_methods_that_are_not_of_this_era_are_not_found(server: Any, modern: Any, method: str) -> None:
    answer = modern(server.url).request(method, {"protocolVersion": "2025-11-25", "level": "info", "uri": "a://b"})
    assert refused(answer, 404, -32601)
    assert server.manager.active == 0


def test_what_is_no_single_request_is_refused(server: Any, modern: Any) -> None:
    client = modern(server.url)
    body, headers = client.prepare("tools/list")
    assert refused(client.post(b"{nope", headers), 400, -32700)
    assert refused(client.post([body], headers), 400, -32600)
    assert refused(client.post({**body, "id": None}, headers), 400, -32600)
    assert refused(client.post({**body, "jsonrpc": "1.0"}, headers), 400, -32600)


def test_notifications_are_taken_and_change_nothing(server: Any, modern: Any) -> None:
    client = modern(server.url)
    body, headers = client.prepare("notifications/cancelled", {"requestId": 1})
    del body["id"]
    answer = client.post(body, headers)
    assert (answer.status, answer.messages) == (202, [])


def test_there_is_no_stream_to_get(server: Any) -> None:
    headers = {"accept": "text/event-stream", "mcp-protocol-version": "2026-07-28"}
    assert http_calls.get(f"{server.url}/mcp", headers=headers, trust_env=False).status_code == 405


def test_the_header_of_a_session_of_the_other_era_means_nothing(server: Any, handshake: Any, modern: Any) -> None:
    other = handshake(server.url)
    other.call("count")
    answer = modern(server.url).call("count", headers={"mcp-session-id": other.session_id})
    assert answer.result["structuredContent"] == {"result": 1}
    assert server.manager.active == 2


@pytest.mark.parametrize("params", [{}, {"name": 7}, {"name": "no such tool"}, {"name": "echo", "arguments": [1]}])
def test_a_call_that_is_wrong_as_a_request_is_refused(server: Any, modern: Any, params: Any) -> None:
    assert refused(modern(server.url).request("tools/call", params), 400, -32602)


def test_a_resource_that_is_not_there_is_named(server: Any, modern: Any) -> None:
    answer = modern(server.url).request("resources/read", {"uri": "note://nowhere"})
    assert refused(answer, 400, -32602)
    assert answer.error["data"] == {"uri": "note://nowhere"}


def test_pages_of_other_sites_are_refused(server: Any, modern: Any) -> None:
    assert modern(server.url).request("tools/list", headers={"origin": "http://evil.example"}).status == 403


# -- tools --------------------------------------------------------------------------------------------------------


def test_a_tool_that_fails_says_so_in_its_result(server: Any, modern: Any) -> None:
    client = modern(server.url)
    for tool, arguments in (("boom", {}), ("echo", {"message": 7}), ("echo", {"other": 1})):
        answer = client.call(tool, arguments)
        assert (answer.status, answer.result["isError"], answer.result["resultType"]) == (200, True, "complete")
    assert "bang" in client.call("boom").text


def test_progress_comes_as_events_before_the_result(server: Any, modern: Any) -> None:
    answer = modern(server.url).call("work", {"steps": 2}, meta={"progressToken": 9})
    assert answer.is_stream
    progress = answer.notes("notifications/progress")
    assert [(note["progressToken"], note["progress"], note["total"]) for note in progress] == [(9, 1, 2), (9, 2, 2)]
    assert (answer.text, answer.result["resultType"]) == ("worked", "complete")


@pytest.mark.parametrize(
    ("level", "levels"), [(None, []), ("debug", ["debug", "info", "error"]), ("error", ["error"]), ("loud", [])]
)
def test_log_messages_come_only_if_the_request_asks(server: Any, modern: Any, level: Any, levels: list[str]) -> None:
    answer = modern(server.url).call("talk", meta={} if level is None else {LOG_LEVEL: level})
    assert [note["level"] for note in answer.notes("notifications/message")] == levels
    assert answer.text == "talked"


@pytest.mark.parametrize("tool", ["wait", "spin"])
def test_hanging_up_cancels_the_call(server: Any, modern: Any, tool: str) -> None:
    client = modern(server.url)
    client.call("count")
    body, headers = client.prepare("tools/call", {"name": tool})

    def post() -> None:
        with pytest.raises(httpx2.ReadTimeout):
            client.http.post("/mcp", json=body, headers=headers, timeout=1.5)

    thread = threading.Thread(target=post)
    thread.start()
    assert server.watch.entered.wait(30)
    thread.join(30)
    assert server.watch.cancelled.wait(30)
    assert client.call("count").result["structuredContent"] == {"result": 2}, "the session is as it was"


# -- state: the cookie --------------------------------------------------------------------------------------------


def test_a_first_call_opens_a_session_that_a_cookie_continues(server: Any, modern: Any) -> None:
    client = modern(server.url)
    first = client.call("count")
    cookie = first.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}={server.session.id};")
    assert "HttpOnly" in cookie
    assert server.watch.resets == 1
    second = client.call("count")
    assert "set-cookie" not in second.headers
    assert [first.result["structuredContent"], second.result["structuredContent"]] == [{"result": 1}, {"result": 2}]
    assert client.request("resources/read", {"uri": "note://today"}).status == 200
    assert server.manager.active == 1


def test_two_clients_do_not_share_state(server: Any, modern: Any) -> None:
    one, other = modern(server.url), modern(server.url)
    assert [one.call("count").result["structuredContent"]["result"] for _ in range(2)] == [1, 2]
    assert other.call("count").result["structuredContent"] == {"result": 1}


def test_an_expired_session_is_reported_and_never_replaced_in_silence(desk: Any, modern: Any) -> None:
    server = desk(lease_s=0.2)
    client = modern(server.url)
    client.call("count")
    server.wait_for(lambda: server.manager.active == 0)
    lost = client.call("count")
    assert (lost.status, lost.result["isError"], lost.result["resultType"]) == (200, True, "complete")
    assert "expired" in lost.text
    assert "Max-Age=0" in lost.headers["set-cookie"]
    assert server.watch.resets == 1, "no other environment was begun"
    assert COOKIE not in client.http.cookies
    assert client.call("count").result["structuredContent"] == {"result": 1}


def test_an_evicted_session_is_reported_and_never_replaced_in_silence(desk: Any, modern: Any, handshake: Any) -> None:
    server = desk(sessions=1)
    client = modern(server.url)
    client.call("count")
    newcomer = handshake(server.url)
    assert newcomer.session_id is not None, "a client that called once makes room"
    lost = client.call("count")
    assert lost.result["isError"] is True
    assert "evicted" in lost.text
    assert server.watch.resets == 2
    assert COOKIE not in client.http.cookies
    full = client.call("count")
    assert (full.status, full.error["code"]) == (200, -32000)
    assert full.error["data"]["max_sessions"] == 1


def test_a_client_that_came_back_is_not_evicted(desk: Any, modern: Any, uninitialized: Any) -> None:
    server = desk(sessions=1)
    client = modern(server.url)
    client.call("count")
    client.call("count")
    assert uninitialized(server.url).initialize().error["code"] == -32000
    assert client.call("count").result["structuredContent"] == {"result": 3}


def test_other_methods_on_a_lost_session_are_refused_or_need_none(desk: Any, modern: Any) -> None:
    server = desk(lease_s=0.2)
    client = modern(server.url)
    client.call("count")
    server.wait_for(lambda: server.manager.active == 0)
    assert client.request("tools/list").status == 200
    read = client.request("resources/read", {"uri": "note://today"})
    assert refused(read, 400, -32602)
    assert "expired" in read.error["message"]


# -- state: explicit handles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["header", "query", "meta"])
def test_a_handle_names_a_session_that_an_orchestrator_has_prepared(server: Any, modern: Any, where: str) -> None:
    reset = http_calls.post(
        f"{server.url}/reset", json={"seed": 40}, headers={"x-openenv-session": "new"}, trust_env=False
    )
    name = reset.headers["x-openenv-session"]
    client = modern(server.url)
    options: dict[str, Any] = {
        "header": {"headers": {"X-OpenEnv-Session": name}},
        "query": {"path": f"/mcp?session_id={name}"},
        "meta": {"meta": {"openenv/session": name}},
    }[where]
    answers = [client.call("count", **options) for _ in range(2)]
    assert [answer.result["structuredContent"]["result"] for answer in answers] == [41, 42]
    assert all("set-cookie" not in answer.headers for answer in answers)
    assert server.watch.resets == 1
    assert server.session.id == name


def test_a_handle_goes_before_the_cookie(server: Any, modern: Any) -> None:
    reset = http_calls.post(
        f"{server.url}/reset", json={"seed": 40}, headers={"x-openenv-session": "new"}, trust_env=False
    )
    client = modern(server.url)
    client.call("count")
    assert client.call("count", meta={"openenv/session": reset.headers["x-openenv-session"]}).text == "41"
    assert client.call("count").text == "2"


def test_a_handle_of_no_session_is_reported_in_the_result(server: Any, modern: Any) -> None:
    answer = modern(server.url).call("count", headers={"X-OpenEnv-Session": "nobody"})
    assert (answer.status, answer.result["isError"]) == (200, True)
    assert "No such session" in answer.text
    assert "set-cookie" not in answer.headers
    assert server.manager.active == 0
