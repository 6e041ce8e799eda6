"""MCP with a handshake: streams, progress, log messages, cancellation, and the end of sessions."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from openenv.server.mcp import endpoint as reply
from waiting import in_background

LEVELS = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]


# -- the stream of GET, and the end -----------------------------------------------------------------------------------


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
    assert server.watch.entered.wait(30)
    client.http.delete("/mcp", headers=client.headers)
    assert answered().error["code"] == -32800
    server.wait_for(lambda: server.watch.alive == 0)


def test_an_unused_session_ends_with_its_lease(desk: Any, handshake: Any) -> None:
    server = desk(sessions=1, lease_s=1.0)
    client = handshake(server.url)
    server.wait_for(lambda: server.manager.active == 0)
    answer = client.call("count")
    assert answer.status == 404
    assert "expired" in answer.error["message"]
    assert handshake(server.url).call("count").result["structuredContent"] == {"result": 1}


# -- progress, logging, cancellation ----------------------------------------------------------------------------------


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
    levels = {}
    for level in ("debug", "info", "warning", "emergency"):
        assert client.request("logging/setLevel", {"level": level}).result == {}
        levels[level] = [note["level"] for note in client.call("talk").notes("notifications/message")]
    assert levels == {
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
    assert server.watch.entered.wait(30)
    client.notify("notifications/cancelled", {"requestId": "other", "reason": "a mistake"})
    assert client.notify("notifications/cancelled", {"requestId": "mine", "reason": "enough"}).status == 202
    answer = answered()
    assert (answer.status, answer.error["code"]) == (200, -32800)
    assert server.watch.cancelled.wait(30)
    assert client.call("count").result["structuredContent"] == {"result": 1}


def test_a_client_cannot_cancel_a_request_of_another(server: Any, handshake: Any) -> None:
    one, other = handshake(server.url), handshake(server.url)
    answered = in_background(lambda: one.call("wait", id=77))
    assert server.watch.entered.wait(30)
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
    assert server.watch.entered.wait(30)
    assert not server.watch.cancelled.is_set()
    client.notify("notifications/cancelled", {"requestId": 5})
    assert server.watch.cancelled.wait(30)
